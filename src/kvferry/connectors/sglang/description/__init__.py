"""What SGLang's memory is to us. In come its pools, and the lists of pages and slots that its scheduler names for a
request; out go a layout, the memory to register, and block tables. Nothing here knows an agent or a request's life.
"""
