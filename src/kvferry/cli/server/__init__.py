"""What every command that serves HTTP needs: sockets, access, logs, an orderly end."""
