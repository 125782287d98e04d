package ai.pagoda;

/**
 * What is cached of a user.
 *
 * @param start the position of the first token
 * @param length how many tokens there are
 * @param tier where they lie
 */
public record CachedUser(long start, long length, Tier tier) {}
