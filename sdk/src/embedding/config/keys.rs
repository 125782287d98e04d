//! The keys that set the options of [`EmbeddingOptions`](crate::embedding::options::EmbeddingOptions).

/// Options as errors name them, each with its key. If an option begins with another one, it comes before it.
pub(super) const KEYS: [(&str, &str); 20] = [
    ("EmbeddingOptions.tiers.memory.partitions", "volatile_db.num_partitions"),
    ("EmbeddingOptions.tiers.memory.overflow.max_rows", "volatile_db.overflow_margin"),
    ("EmbeddingOptions.tiers.memory.overflow.keep", "volatile_db.overflow_resolution_target"),
    ("EmbeddingOptions.tiers.memory", "volatile_db"),
    ("EmbeddingOptions.tiers.redis.nodes", "volatile_db.address"),
    ("EmbeddingOptions.tiers.redis.partitions", "volatile_db.num_partitions"),
    ("EmbeddingOptions.tiers.redis.overflow.max_rows", "volatile_db.overflow_margin"),
    ("EmbeddingOptions.tiers.redis.overflow.keep", "volatile_db.overflow_resolution_target"),
    ("EmbeddingOptions.tiers.redis.timeout", "volatile_db.timeout_ms"),
    ("EmbeddingOptions.tiers.redis.breaker_failures", "volatile_db.breaker_failures"),
    ("EmbeddingOptions.tiers.redis.breaker_pause", "volatile_db.breaker_open_ms"),
    ("EmbeddingOptions.tiers.redis.connections_per_node", "volatile_db.num_node_connections"),
    ("EmbeddingOptions.tiers.redis.tls", "volatile_db.enable_tls"),
    ("EmbeddingOptions.tiers.disk.drop_updates_on_source_change", "persistent_db.drop_updates_on_source_change"),
    ("EmbeddingOptions.tiers.disk.read_only", "persistent_db.read_only"),
    ("EmbeddingOptions.tiers.disk.path", "persistent_db.path"),
    ("EmbeddingOptions.tiers.disk", "persistent_db"),
    ("EmbeddingOptions.tiers", "volatile_db"),
    ("EmbeddingOptions.models.cache.size", "models.gpucacheper"),
    ("EmbeddingOptions.models.devices", "models.deployed_device_list"),
];

/// A text in which options are named by their keys.
pub(super) fn name_keys(text: &str) -> String {
    KEYS.iter().fold(text.to_owned(), |text, (option, key)| text.replace(option, key))
}
