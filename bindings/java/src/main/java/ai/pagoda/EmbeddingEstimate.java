package ai.pagoda;

/**
 * What tables will take, about.
 *
 * @param memory bytes of memory in this process
 * @param disk bytes of their files
 */
public record EmbeddingEstimate(long memory, long disk) {}
