package ai.pagoda;

/**
 * What is cached of an owner.
 *
 * @param start the position of the first token
 * @param length how many tokens there are
 * @param tier where they lie
 */
public record CachedOwner(long start, long length, Tier tier) {}
