package ai.pagoda;

import java.util.List;

/**
 * The answers to a request.
 *
 * @param choices the answers
 * @param promptTokens the tokens of the prompt
 * @param promptLogprobs the log probabilities of the prompt's tokens, if they were asked for; the first token has none: its
 *     rank is 0
 * @param cachedTokens the number of prompt tokens whose keys and values were cached, of the first answer
 * @param computedTokens the number of rows that were computed for all answers
 * @param version the version of the model, as in its pagoda.json
 */
public record GenerateResponse(List<Choice> choices, int[] promptTokens, List<TokenLogprobs> promptLogprobs,
        int cachedTokens, long computedTokens, String version) {}
