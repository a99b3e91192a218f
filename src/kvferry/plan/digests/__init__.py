"""What is digested of a request, and where its bytes lie on either side."""
