"""The contracts: Avro schemas, typed records, topics and the codec between bytes and records."""
