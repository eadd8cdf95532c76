"""Other libraries' models on this library's attention. Each is imported only when asked for."""
