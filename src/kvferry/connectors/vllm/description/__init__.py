"""From vLLM's cache specifications and tensors to our description of a rank.

Enters: `KVCacheConfig`, tensors, vLLM's configuration. Leaves: a layout, and the memory to register. It knows no
request. `describe` has the kinds of specification, by their exact class; `attention` and `recurrent` say what each
becomes, `groups` how blocks are counted, `engine_facts` what vLLM's configuration adds.
"""
