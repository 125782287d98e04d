package ai.pagoda;

import java.nio.ByteBuffer;
import java.nio.CharBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Arrays;
import java.util.Collection;
import java.util.Objects;

/** Loads the native part, and turns what Java has into what it takes. */
final class Native {
    /** In a list of options: what it was not said, so that pagoda.h's default stays. */
    static final long UNSET = Long.MIN_VALUE;

    static {
        Loader.load();
        try {
            checkAbi();
        } catch (PagodaException error) {
            throw (Error) new UnsatisfiedLinkError(error.getMessage()).initCause(error);
        }
    }

    private Native() {}

    /** Has the native part loaded, if it is not yet. Every class with native methods calls it before anything else. */
    static void load() {}

    /** Throws if libpagoda.so is not of the version that the native part was built with. */
    private static native void checkAbi();

    /**
     * Waits for a call that has ended, but on a thread that Java had no memory to let in. Returns null if there is not
     * even enough for that, which is to be asked again.
     */
    static native Pending<?> untold();

    /** UTF-8 with a NUL at the end. Texts that C could not take whole are refused. */
    static byte[] text(String text, String name) {
        byte[] bytes = utf8(text, name);
        for (byte b : bytes) {
            if (b == 0) {
                throw new IllegalArgumentException(name + ": the text has a NUL character in it: leave that out");
            }
        }
        return Arrays.copyOf(bytes, bytes.length + 1);
    }

    /** The same, or null for a null. */
    static byte[] textOrNull(String text, String name) {
        return text == null ? null : text(text, name);
    }

    /** Texts one after the other, each with a NUL at its end. */
    static byte[] texts(Collection<String> texts, String name) {
        byte[][] parts = new byte[texts.size()][];
        int count = 0;
        int length = 0;
        for (String text : texts) {
            // A collection that another thread changes must not lead to fewer texts than C is told of.
            parts[count] = text(text, name + "[" + count + "]");
            length += parts[count++].length;
        }
        if (count != parts.length) {
            throw new IllegalArgumentException(name + ": changed during the call");
        }
        byte[] all = new byte[length];
        int at = 0;
        for (byte[] part : parts) {
            System.arraycopy(part, 0, all, at, part.length);
            at += part.length;
        }
        return all;
    }

    /** UTF-8. Half a surrogate pair is refused: it would silently become another text. */
    static byte[] utf8(String text, String name) {
        Objects.requireNonNull(text, name);
        try {
            ByteBuffer bytes = StandardCharsets.UTF_8.newEncoder().encode(CharBuffer.wrap(text));
            return Arrays.copyOf(bytes.array(), bytes.limit());
        } catch (CharacterCodingException error) {
            throw new IllegalArgumentException(name + ": the text has half a surrogate pair in it", error);
        }
    }

    static String string(byte[] utf8) {
        return new String(utf8, StandardCharsets.UTF_8);
    }

    /** A number that must not be negative, since C has it unsigned. */
    static long unsigned(long value, String name) {
        if (value < 0) {
            throw new IllegalArgumentException(name + ": " + value + " is negative: give 0 or more");
        }
        return value;
    }

    /** Whole microseconds, or as many as a long holds, which is longer than any wait. */
    static long micros(Duration time, String name) {
        if (time.isNegative()) {
            throw new IllegalArgumentException(name + ": " + time + " is negative: give zero or more");
        }
        long seconds = time.getSeconds();
        return seconds < Long.MAX_VALUE / 1_000_000 ? seconds * 1_000_000 + time.getNano() / 1000 : Long.MAX_VALUE;
    }
}
