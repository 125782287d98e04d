package ai.pagoda;

/**
 * What one user of a batch brings.
 *
 * @param user the user
 * @param start the position of the first new token in the user's history
 * @param tokens how many new tokens there are
 * @param candidates how many candidates follow them
 * @param items if the cache looks out for edited histories: the items of the history up to the last new token, of all
 *     new tokens at least, and of as many before them as are to be checked; else empty
 */
public record KvRequest(long user, long start, int tokens, int candidates, long... items) {}
