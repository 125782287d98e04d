package ai.pagoda;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;

/** Numbers, texts and lists, one after the other, in the order in which C takes them. */
final class Packed {
    private long[] numbers = new long[64];
    private int count;
    private final List<String> texts = new ArrayList<>();
    private int[] ints = {};

    /** A number; {@link Native#UNSET} leaves the default of pagoda.h. */
    void number(long value) {
        if (count == numbers.length) {
            numbers = Arrays.copyOf(numbers, 2 * count);
        }
        numbers[count++] = value;
    }

    void numbers(long... values) {
        for (long value : values) {
            number(value);
        }
    }

    /** A float as a number, to be read by take_float. */
    static long bits(float value) {
        return Float.floatToRawIntBits(value);
    }

    /** The same of one that must not be negative: to C that would be the default. */
    static long unsigned(float value, String name) {
        if (value < 0) {
            throw new IllegalArgumentException(name + ": " + value + " is negative: give 0 or more");
        }
        return bits(value);
    }

    /** A text; whether it is null is among the numbers. */
    void text(String text, String name) {
        number(text == null ? 0 : 1);
        if (text != null) {
            add(text, name);
        }
    }

    /** Texts; how many there are is among the numbers. */
    void texts(List<String> all, String name) {
        number(all.size());
        all.forEach(text -> add(text, name));
    }

    /** Checked here, where its name is known. */
    private void add(String text, String name) {
        Native.text(text, name);
        texts.add(text);
    }

    /** A list; how many it has is among the numbers. */
    void ints(int[] list) {
        number(list.length);
        int at = ints.length;
        ints = Arrays.copyOf(ints, Math.addExact(at, list.length));
        System.arraycopy(list, 0, ints, at, list.length);
    }

    long[] numbers() {
        return Arrays.copyOf(numbers, count);
    }

    byte[] texts() {
        return Native.texts(texts, "texts");
    }

    int[] ints() {
        return ints;
    }
}
