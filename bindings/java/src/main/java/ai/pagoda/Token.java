package ai.pagoda;

/**
 * A token of an answer, as it is generated.
 *
 * @param choice which answer it belongs to
 * @param id the token
 * @param text the text that is new; empty if the token ends inside a character, or if the text may begin a stop text
 * @param finishReason why the answer ends with this token; {@link FinishReason#NONE} if it does not
 * @param logprobs the log probabilities; {@code null} if they were not asked for
 */
public record Token(int choice, int id, String text, FinishReason finishReason, TokenLogprobs logprobs) {}
