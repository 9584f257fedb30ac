"""MCP client and server: other servers' tools for our models, and our models as tools. Needs the extra `mcp`."""
