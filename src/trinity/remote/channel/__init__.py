"""Messages between processes: connections, their handshake and TLS, and what is sent over them."""
