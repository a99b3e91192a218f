"""What SGLang's memory is to us.

Enters: its pools, and the lists of pages and slots that its scheduler names for a request. Leaves: a layout, the memory
to register, and block tables. Nothing here knows an agent or a request's life.
"""
