package ai.pagoda;

import java.util.List;

/**
 * What the model thought of a token, before anything that the request asked for.
 *
 * @param logprob the natural logarithm of the token's probability
 * @param rank its place among all tokens, 1 for the most likely; 0: it has no probability, as the first token of a prompt
 * @param top the most likely tokens, as many as were asked for, the most likely first
 */
public record TokenLogprobs(float logprob, int rank, List<TopLogprob> top) {
    static TokenLogprobs of(float logprob, int rank, int[] tokens, float[] logprobs) {
        TopLogprob[] top = new TopLogprob[tokens.length];
        for (int i = 0; i < top.length; i++) {
            top[i] = new TopLogprob(tokens[i], logprobs[i]);
        }
        return new TokenLogprobs(logprob, rank, List.of(top));
    }
}
