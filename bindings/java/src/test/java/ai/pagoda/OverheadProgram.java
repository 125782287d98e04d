package ai.pagoda;

import java.nio.file.Path;
import java.util.function.IntSupplier;

/** What OverheadTest runs in a process of its own, without -Xcheck:jni: a stream's tokens against those of plain C. */
final class OverheadProgram {
    private static final long GOAL_NANOS = 2_000;

    private OverheadProgram() {}

    private static native int openPlain(String folder);

    private static native int streamPlain(int answers, int count);

    private static native void closePlain();

    /** The library of plain_stream.c, and the model folder. */
    public static void main(String[] arguments) {
        Native.load();
        System.load(arguments[0]);
        if (openPlain(arguments[1]) != 0) {
            throw new AssertionError("the generator of plain C was not opened");
        }
        boolean kept;
        try (Generator generator = Generator.open(Path.of(arguments[1]), new GeneratorOptions().kvSize(KvSize.pages(256))
                .model(new ModelOptions().provider(Provider.CPU).intraOpThreads(1).sleepWhenIdle(true)))) {
            // An answer alone, whose reader is woken for each token; and many at once, whose tokens share the steps of the
            // model and the wake-ups.
            kept = costsLittleMore(generator, 1, 400) & costsLittleMore(generator, 32, 50);
        } finally {
            closePlain();
        }
        System.exit(kept && Pagoda.liveObjects() == 0 ? 0 : 1);
    }

    private static boolean costsLittleMore(Generator generator, int answers, int length) {
        int count = answers * length;
        GenerateRequest request = new GenerateRequest().tokens(5, 6, 7, 8, 9, 10, 11, 12).doSample(false).ignoreEos(true)
                .maxNewTokens(length).n(answers);
        IntSupplier stream = () -> (int) generator.stream(request).tokens().count();
        // The first ones are for the compiler. After that the best of many tries, taken in turns, for other programs may
        // have the processor during any one; if they had it during all of them, there are more.
        for (int i = 0; i < 20; i++) {
            nanos(count, stream);
        }
        long ours = Long.MAX_VALUE;
        long plain = Long.MAX_VALUE;
        for (int round = 0; round < 100 && (round == 0 || ours - plain > GOAL_NANOS); round++) {
            for (int i = 0; i < 5; i++) {
                ours = Math.min(ours, nanos(count, stream));
                plain = Math.min(plain, nanos(count, () -> streamPlain(answers, length)));
            }
        }
        System.out.println("of " + answers + " answers, a token " + ours + " ns, in plain C " + plain + " ns");
        return ours - plain <= GOAL_NANOS;
    }

    /** How long one of the tokens took. */
    private static long nanos(int count, IntSupplier stream) {
        long begin = System.nanoTime();
        int read = stream.getAsInt();
        long took = System.nanoTime() - begin;
        if (read != count) {
            throw new AssertionError(read + " tokens");
        }
        return took / read;
    }
}
