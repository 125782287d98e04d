package ai.pagoda;

import java.nio.file.Path;
import java.util.function.IntSupplier;

/** What OverheadTest runs in a process of its own, without -Xcheck:jni: a stream's tokens against those of plain C. */
final class OverheadProgram {
    // Many answers, for a step of the model is then shared by many tokens: alone it takes many times as long as what is
    // measured.
    private static final int ANSWERS = 32;
    private static final int LENGTH = 50;
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
        long ours = Long.MAX_VALUE;
        long plain = Long.MAX_VALUE;
        try (Generator generator = Generator.open(Path.of(arguments[1]), new GeneratorOptions().kvSize(KvSize.pages(256))
                .model(new ModelOptions().provider(Provider.CPU).intraOpThreads(1).sleepWhenIdle(true)))) {
            GenerateRequest request = new GenerateRequest().tokens(5, 6, 7, 8, 9, 10, 11, 12).doSample(false)
                    .ignoreEos(true).maxNewTokens(LENGTH).n(ANSWERS);
            IntSupplier stream = () -> (int) generator.stream(request).tokens().count();
            // The first ones are for the compiler. After that the best of many tries, taken in turns, for other programs may
            // have the processor during any one; if they had it during all of them, there are more.
            for (int i = 0; i < 20; i++) {
                nanos(stream);
            }
            for (int round = 0; round < 100 && (round == 0 || ours - plain > GOAL_NANOS); round++) {
                for (int i = 0; i < 5; i++) {
                    ours = Math.min(ours, nanos(stream));
                    plain = Math.min(plain, nanos(() -> streamPlain(ANSWERS, LENGTH)));
                }
            }
        } finally {
            closePlain();
        }
        System.out.println("a token " + ours + " ns, in plain C " + plain + " ns");
        System.exit(ours - plain <= GOAL_NANOS && Pagoda.liveObjects() == 0 ? 0 : 1);
    }

    /** How long one of the tokens took. */
    private static long nanos(IntSupplier stream) {
        long begin = System.nanoTime();
        int read = stream.getAsInt();
        long took = System.nanoTime() - begin;
        if (read != ANSWERS * LENGTH) {
            throw new AssertionError(read + " tokens");
        }
        return took / read;
    }
}
