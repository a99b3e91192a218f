"""From vLLM's cache specifications and tensors to our description of a rank.

`describe` has the kinds of specification, by their exact class; `attention` and `recurrent` say what each becomes,
`groups` how blocks are counted, `facts` what vLLM's configuration adds.
"""
