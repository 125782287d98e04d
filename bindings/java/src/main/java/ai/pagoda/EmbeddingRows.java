package ai.pagoda;

import java.util.Arrays;

/** What a lookup found. */
public final class EmbeddingRows {
    private final int dim;
    private final float[] numbers;
    private final byte[] found;

    EmbeddingRows(int dim, float[] numbers, byte[] found) {
        this.dim = dim;
        this.numbers = numbers;
        this.found = found;
    }

    /**
     * How many numbers a row has.
     *
     * @return the number
     */
    public int dim() {
        return dim;
    }

    /**
     * How many rows there are: one for each key, or for each slot.
     *
     * @return the number
     */
    public int size() {
        return dim == 0 ? 0 : numbers.length / dim;
    }

    /**
     * All rows, one after the other.
     *
     * @return the numbers, not a copy
     */
    public float[] numbers() {
        return numbers;
    }

    /**
     * One of the rows.
     *
     * @param index which
     * @return a copy of it
     */
    public float[] row(int index) {
        if (index < 0 || index >= size()) {
            throw new IndexOutOfBoundsException("index: there are " + size() + " rows, and no row " + index);
        }
        return Arrays.copyOfRange(numbers, index * dim, (index + 1) * dim);
    }

    /**
     * Whether the row of a key was found, or it got the default vector.
     *
     * @param key which of the keys
     * @return whether it was found
     */
    public boolean found(int key) {
        return found[key] != 0;
    }
}
