package ai.pagoda;

/**
 * What a lease has of an owner.
 *
 * @param owner the owner
 * @param start the position where the history begins, as the model sees it
 * @param cached how many of its tokens are cached
 * @param tokens how many are new; the model appends them
 * @param trimmed how many rows at the beginning of the request were cached already, where overlaps are trimmed: they
 *     must be left out of the model's rows
 */
public record LeasedOwner(long owner, long start, int cached, int tokens, int trimmed) {}
