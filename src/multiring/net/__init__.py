"""Sockets: who may speak (auth), accepting, dialling, the addresses of a host, links between ranks."""
