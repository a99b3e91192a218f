"""What is digested of a request, and where its bytes lie on either side.

Enters: legs, layouts, block tables, token ranges and a policy. Leaves: a `Subject`, which travels with a claim, and
`Extract`s, addresses of bytes. It computes no hash and reads no memory.
"""
