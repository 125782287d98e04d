package ai.pagoda;

import java.util.Objects;

/**
 * A fixed number of slots for the keys and values of each sequence, however long it is. What is not set stays at its
 * default.
 */
public final class KvPolicy {
    private final String name;
    private long cacheLength = Native.UNSET;
    private long chunkSize = Native.UNSET;
    private long protect = Native.UNSET;
    private long gracePeriod = Native.UNSET;
    private long keepInitialFraction = Native.UNSET;
    private long normalise = Native.UNSET;
    private long scoreShare = Native.UNSET;
    private long protectFirstMessage = Native.UNSET;
    private int[] cacheLengths = {};

    /**
     * A policy without slots yet.
     *
     * @param name which tokens stay: "dense" (all of them, and a sequence of more than {@link #cacheLength} is rejected),
     *     "lastrec", "smart-lastrec", "h2o", "h2o-orig", "h2o-vlen" and, for quantised pages, "qh2o" and "qh2o-vlen"
     */
    public KvPolicy(String name) {
        this.name = Objects.requireNonNull(name, "name");
    }

    /**
     * The slots of a sequence in each layer: its pages hold so many tokens. With "dense" 0 is no limit; default 0.
     *
     * @param cacheLength how many
     * @return this policy
     */
    public KvPolicy cacheLength(int cacheLength) {
        this.cacheLength = cacheLength;
        return this;
    }

    /**
     * The maximum number of tokens of a prompt that one step reads once the slots are full; default 64.
     *
     * @param chunkSize how many
     * @return this policy
     */
    public KvPolicy chunkSize(int chunkSize) {
        this.chunkSize = chunkSize;
        return this;
    }

    /**
     * With lastrec and smart-lastrec: the tokens at the beginning that always stay; default: for lastrec an eighth of
     * the slots, from 1 to 16; for smart-lastrec half of them.
     *
     * @param protect how many
     * @return this policy
     */
    public KvPolicy protect(int protect) {
        this.protect = Native.unsigned(protect, "protect");
        return this;
    }

    /**
     * With h2o: the newest tokens, so many of them, stay whatever their weights; default 0.
     *
     * @param gracePeriod how many
     * @return this policy
     */
    public KvPolicy gracePeriod(int gracePeriod) {
        this.gracePeriod = gracePeriod;
        return this;
    }

    /**
     * With h2o: the part of the slots that the first eviction leaves alone at the beginning; default 0.05.
     *
     * @param keepInitialFraction the part
     * @return this policy
     */
    public KvPolicy keepInitialFraction(float keepInitialFraction) {
        this.keepInitialFraction = Packed.bits(keepInitialFraction);
        return this;
    }

    /**
     * With h2o: whether the weights that a token got are divided by the time that it has been there; default: no.
     *
     * @param normalise whether they are
     * @return this policy
     */
    public KvPolicy normalise(boolean normalise) {
        this.normalise = normalise ? 1 : 0;
        return this;
    }

    /**
     * With qh2o: how much a token's weights count against what quantisation took from it, from 0 to 1; default 0.5.
     *
     * @param scoreShare how much
     * @return this policy
     */
    public KvPolicy scoreShare(float scoreShare) {
        this.scoreShare = Packed.bits(scoreShare);
        return this;
    }

    /**
     * With lastrec and smart-lastrec: whether the tokens of a chat's first message always stay, as the model's
     * template writes it; mostly it is the system prompt. {@link #protect} holds for other prompts. Default: no.
     *
     * @param protectFirstMessage whether they do
     * @return this policy
     */
    public KvPolicy protectFirstMessage(boolean protectFirstMessage) {
        this.protectFirstMessage = protectFirstMessage ? 1 : 0;
        return this;
    }

    /**
     * The slots of each layer, instead of {@link #cacheLength}; default: all have as many. A sequence's pages are those of
     * the layer that has the most.
     *
     * @param cacheLengths how many each has
     * @return this policy
     */
    public KvPolicy cacheLengths(int... cacheLengths) {
        this.cacheLengths = cacheLengths.clone();
        return this;
    }

    /** In the order that generator.c reads it; whether there is one comes first. */
    static void pack(KvPolicy from, Packed to) {
        to.number(from == null ? 0 : 1);
        if (from != null) {
            to.text(from.name, "kvPolicy.name");
            to.numbers(from.cacheLength, from.chunkSize, from.protect, from.gracePeriod, from.keepInitialFraction, from.normalise, from.scoreShare, from.protectFirstMessage);
            to.ints(from.cacheLengths);
        }
    }
}
