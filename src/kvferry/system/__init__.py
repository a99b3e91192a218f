"""What the operating system says and does: its errors in words, and sockets that notice a lost host."""
