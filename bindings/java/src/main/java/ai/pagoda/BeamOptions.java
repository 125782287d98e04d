package ai.pagoda;

import java.util.Objects;

/** A beam search. What is not set stays at its default. */
public final class BeamOptions {
    private long width = Native.UNSET;
    private long lengthPenalty = Native.UNSET;
    private long earlyStop = Native.UNSET;

    /** A search with 4 beams. */
    public BeamOptions() {}

    /**
     * The number of beams, 1 to 16; default 4.
     *
     * @param width how many
     * @return these options
     */
    public BeamOptions width(int width) {
        this.width = width;
        return this;
    }

    /**
     * The score of an answer is the sum of its log probabilities over its number of tokens to this power; default 1. Above 0
     * long answers get better scores, below 0 short ones.
     *
     * @param lengthPenalty the power
     * @return these options
     */
    public BeamOptions lengthPenalty(float lengthPenalty) {
        this.lengthPenalty = Packed.bits(lengthPenalty);
        return this;
    }

    /**
     * When the search ends; default {@link EarlyStop#WHEN_UNLIKELY}.
     *
     * @param earlyStop when
     * @return these options
     */
    public BeamOptions earlyStop(EarlyStop earlyStop) {
        this.earlyStop = Objects.requireNonNull(earlyStop, "earlyStop").number;
        return this;
    }

    /** In the order that generator.c reads them; whether there are any is the first number. */
    static void pack(BeamOptions beams, Packed to) {
        to.number(beams == null ? 0 : 1);
        if (beams != null) {
            to.numbers(beams.width, beams.lengthPenalty, beams.earlyStop);
        }
    }
}
