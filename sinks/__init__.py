"""Where results go to stay: ClickHouse, and the queries that answer questions from it."""
