package ai.pagoda;

/**
 * One of the most likely tokens in a place.
 *
 * @param token the token
 * @param logprob the natural logarithm of its probability
 */
public record TopLogprob(int token, float logprob) {}
