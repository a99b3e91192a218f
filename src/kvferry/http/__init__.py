"""What every HTTP server and client of this package shares: the OpenAI dialect, request ids, API keys, CORS.

Enters: headers, fields and errors. Leaves: records, error objects, labels. It knows neither the router nor an engine.
"""
