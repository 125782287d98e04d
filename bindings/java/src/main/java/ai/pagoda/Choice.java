package ai.pagoda;

import java.time.Duration;
import java.util.List;

/**
 * One answer.
 *
 * @param text its text
 * @param tokens its tokens; those that ended it are the last ones
 * @param logprobs the log probabilities of its tokens, if they were asked for
 * @param finishReason why it ended
 * @param missing what the request's grammar expects next, if the answer ended before it was valid; else empty
 * @param queued the time from the request to its first step
 * @param firstToken the time from the request to the first token
 * @param generation the time from the first token to the last
 * @param score of an answer of a beam search, the sum of its log probabilities over its number of tokens to the power of the
 *     length penalty, with penalties and biases; else {@code null}
 */
public record Choice(String text, int[] tokens, List<TokenLogprobs> logprobs, FinishReason finishReason, String missing,
        Duration queued, Duration firstToken, Duration generation, Float score) {}
