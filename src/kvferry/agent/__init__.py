"""The only owner of threads and sockets of the transfer: feeds sessions with events and does what they command."""
