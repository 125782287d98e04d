package ai.pagoda;

/** Why an answer ended. */
public enum FinishReason {
    /** It has not ended. */
    NONE(0),
    /** An end-of-sequence token, a stop token, or a stop text. */
    STOP(1),
    /** Its maximum number of tokens, or the end of the context. */
    LENGTH(2),
    /** It was cancelled. */
    CANCELLED(3),
    /** Its time limit was exceeded. */
    TIMEOUT(4),
    /** Another one, that this version does not know. */
    UNKNOWN(-1);

    final int number;

    FinishReason(int number) {
        this.number = number;
    }

    static FinishReason of(int number) {
        for (FinishReason one : values()) {
            if (one.number == number) {
                return one;
            }
        }
        return UNKNOWN;
    }
}
