package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.nio.file.Path;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.junit.jupiter.api.io.TempDir;

/** A token of a stream costs at most two microseconds more than one that its caller reads in C. */
class OverheadTest {
    @TempDir
    Path folder;

    private static void run(List<String> command) throws Exception {
        assertEquals(0, new ProcessBuilder(command).inheritIO().start().waitFor(), String.join(" ", command));
    }

    // Only `make bench` runs it: a machine that is busy with other tests would decide the outcome.
    @Test
    @EnabledIfEnvironmentVariable(named = "PAGODA_BENCH", matches = "1")
    void aTokenCostsLittleMoreThanInPlainC() throws Exception {
        Path java = Path.of(System.getProperty("java.home"));
        Path include = java.resolve("include");
        String natives = Path.of(System.getProperty("pagoda.native.dir")).toAbsolutePath().normalize().toString();
        String library = folder.resolve("plain_stream.so").toString();
        run(List.of("cc", "-O2", "-shared", "-fPIC", "-I" + include, "-I" + include + "/linux",
                "-I" + Support.ROOT.resolve("include"), "-I" + Support.ROOT.resolve("bindings/go/internal/plain"),
                Support.ROOT.resolve("bindings/java/src/test/native/plain_stream.c").toString(), "-o", library,
                "-L" + natives, "-lpagoda", "-Wl,-rpath," + natives));
        run(List.of(java.resolve("bin/java").toString(), "-Dpagoda.native.dir=" + natives, "-cp",
                Support.ROOT.resolve("target/java/classes") + ":" + Support.ROOT.resolve("target/java/test-classes"),
                OverheadProgram.class.getName(), library, Support.LLAMA.toString()));
    }
}
