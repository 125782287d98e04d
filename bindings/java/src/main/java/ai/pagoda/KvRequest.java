package ai.pagoda;

/**
 * What one owner of a batch brings.
 *
 * @param owner the owner
 * @param start the position of the first new token in the owner's history
 * @param tokens how many new tokens there are
 * @param candidates how many candidates follow them
 * @param items if the cache looks out for edited histories: the items of the history up to the last new token, of all
 *     new tokens at least, and of as many before them as are to be checked; else empty
 */
public record KvRequest(long owner, long start, int tokens, int candidates, long... items) {}
