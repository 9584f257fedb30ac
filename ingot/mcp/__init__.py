"""MCP, both ways: tools of other servers for our models, and our models as tools for others. Needs the extra `mcp`."""
