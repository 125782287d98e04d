package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.jar.JarEntry;
import java.util.jar.JarOutputStream;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/** Where the native part is found, each time in a process of its own. */
class LoadingTest {
    private static final Path NATIVES = Path.of(System.getProperty("pagoda.native.dir"));
    private static final Path JAVA = Path.of(System.getProperty("java.home"));
    private static final Path CLASSES = Support.ROOT.resolve("target/java/classes");
    private static final List<String> FILES = List.of("libpagoda_jni.so", "libpagoda.so.1", "libonnxruntime.so.1");

    @TempDir
    Path folder;
    private Path jar;

    @BeforeEach
    void makeJar() throws IOException {
        jar = jar(Files.createDirectories(folder.resolve("prefix/share/java")).resolve("pagoda.jar"), false);
    }

    private static Path jar(Path path, boolean natives) throws IOException {
        try (OutputStream file = Files.newOutputStream(path); JarOutputStream out = new JarOutputStream(file)) {
            try (Stream<Path> classes = Files.walk(CLASSES)) {
                for (Path from : classes.filter(Files::isRegularFile).toList()) {
                    out.putNextEntry(new JarEntry(CLASSES.relativize(from).toString()));
                    Files.copy(from, out);
                }
            }
            out.setLevel(1);
            for (String name : natives ? FILES : List.<String>of()) {
                out.putNextEntry(new JarEntry("ai/pagoda/native/linux-" + System.getProperty("os.arch") + "/" + name));
                Files.copy(NATIVES.resolve(name), out);
            }
        }
        return path;
    }

    private String java(Path jar, String... options) throws Exception {
        return run(JAVA, Map.of(), arguments(jar, options));
    }

    private List<String> arguments(Path jar, String... options) {
        return arguments(LoadingProgram.class, jar, options);
    }

    private List<String> arguments(Class<?> program, Path jar, String... options) {
        List<String> arguments = new ArrayList<>(List.of(options));
        arguments.addAll(List.of("-cp", jar + ":" + Support.ROOT.resolve("target/java/test-classes"),
                "-Djava.io.tmpdir=" + folder, "-Dpagoda.root=" + Support.ROOT, program.getName(),
                Support.HELLO.toString()));
        return arguments;
    }

    /** What a process printed, with its exit code before it. */
    private static String run(Path java, Map<String, String> environment, List<String> arguments) throws Exception {
        List<String> command = new ArrayList<>(arguments);
        command.add(0, java.resolve("bin/java").toString());
        ProcessBuilder builder = new ProcessBuilder(command).redirectErrorStream(true);
        builder.environment().putAll(environment);
        Process process = builder.start();
        String printed = new String(process.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
        return process.waitFor() + " " + printed;
    }

    private void link(Path to) throws IOException {
        Files.createDirectories(to);
        for (String name : FILES) {
            Files.createSymbolicLink(to.resolve(name), NATIVES.resolve(name).toRealPath());
        }
    }

    private void runs(String printed) {
        assertTrue(printed.startsWith("0 ") && printed.contains("it runs, Pagoda " + Pagoda.version()), printed);
    }

    @Test
    void byTheProperty() throws Exception {
        runs(java(jar, "-Dpagoda.native.dir=" + NATIVES));
        // Another folder is not looked for behind the back of who names one.
        link(jar.getParent());
        String printed = java(jar, "-Dpagoda.native.dir=" + folder);
        assertTrue(printed.startsWith("1 ") && printed.contains(folder.resolve("libpagoda_jni.so").toString()),
                printed);
    }

    @Test
    void besideTheJar() throws Exception {
        link(jar.getParent());
        runs(java(jar));
    }

    @Test
    void whereAnInstalledPagodaHasIt() throws Exception {
        link(folder.resolve("prefix/lib"));
        runs(java(jar));
    }

    @Test
    void inTheJar() throws Exception {
        Path whole = jar(folder.resolve("whole.jar"), true);
        runs(java(whole));
        try (Stream<Path> left = Files.list(folder)) {
            assertEquals(List.of(), left.filter(path -> path.getFileName().toString().startsWith("pagoda-")).toList());
        }
    }

    @Test
    void onTheLibraryPath() throws Exception {
        runs(java(jar, "-Djava.library.path=" + NATIVES));
    }

    @Test
    void nowhereNamesEveryPlace() throws Exception {
        String printed = java(jar, "-Djava.library.path=/no/such/folder");
        assertTrue(printed.startsWith("1 "), printed);
        for (String place : List.of("UnsatisfiedLinkError", "-Dpagoda.native.dir=",
                jar.resolveSibling("libpagoda_jni.so")
                .toString(), folder.resolve("prefix/lib/libpagoda_jni.so").toString(), "/ai/pagoda/native/linux-",
                "java.library.path: /no/such/folder")) {
            assertTrue(printed.contains(place), place + " is not in: " + printed);
        }
    }

    /** Threads whose first uses come at the same time do not wait for each other. */
    @Test
    void byThreadsThatBeginTogether() throws Exception {
        runs(run(JAVA, Map.of(), arguments(FirstUsesProgram.class, jar, "-Dpagoda.native.dir=" + NATIVES)));
    }

    /** With a libpagoda that says of itself that it is another version. */
    @Test
    void anotherVersionIsRefused() throws Exception {
        Path source = Files.writeString(folder.resolve("other.c"),
                "int pagoda_abi_check(unsigned version, void **error) { (void)error; return version == 1 ? 4 : 0; }\n");
        Path other = folder.resolve("other.so");
        assertEquals(0, new ProcessBuilder("cc", "-shared", "-fPIC", source.toString(), "-o", other.toString())
                .inheritIO().start().waitFor());
        link(jar.getParent());
        String printed = run(JAVA, Map.of("LD_PRELOAD", other.toString()), arguments(jar));
        assertTrue(printed.startsWith("1 ") && printed.contains("java.lang.UnsatisfiedLinkError"), printed);
        assertTrue(printed.contains("Caused by: ai.pagoda.PagodaException"), printed);
    }

    /** The Java that runs this, and the newest one beside it, where the former is too old to warn. */
    static List<Path> javas() throws IOException {
        List<Path> all = new ArrayList<>(List.of(JAVA));
        try (Stream<Path> beside = Files.list(JAVA.getParent())) {
            beside.max(Comparator.comparingInt(LoadingTest::version))
                    .filter(newest -> version(JAVA) < 24 && version(newest) >= 24).ifPresent(all::add);
        }
        return all;
    }

    /** 17, say; 0 if there is no Java in that folder, or no file that tells. */
    private static int version(Path java) {
        try {
            String about = Files.readString(java.resolve("release"));
            Matcher version = Pattern.compile("JAVA_VERSION=\"(\\d+)").matcher(about);
            boolean there = version.find() && Files.isExecutable(java.resolve("bin/java"));
            return there ? Integer.parseInt(version.group(1)) : 0;
        } catch (IOException none) {
            return 0;
        }
    }

    /** From JDK 24 on loading a native library warns, and says which leave to give; with that it does not. */
    private void warnsOnlyWithoutLeave(Path java, String leave, List<String> arguments) throws Exception {
        String printed = run(java, Map.of(), arguments);
        runs(printed);
        assertEquals(version(java) >= 24, printed.contains("WARNING: Use " + leave), printed);
        arguments.add(0, leave);
        printed = run(java, Map.of(), arguments);
        runs(printed);
        assertFalse(printed.contains("WARNING"), printed);
    }

    @ParameterizedTest
    @MethodSource("javas")
    void onTheClassPath(Path java) throws Exception {
        link(jar.getParent());
        warnsOnlyWithoutLeave(java, "--enable-native-access=ALL-UNNAMED", arguments(jar));
    }

    @ParameterizedTest
    @MethodSource("javas")
    void asAModule(Path java) throws Exception {
        link(jar.getParent());
        Path program = Files.writeString(folder.resolve("Program.java"), """
                import ai.pagoda.*;
                class Program {
                    public static void main(String[] arguments) {
                        System.out.println("in " + Pagoda.class.getModule() + " it runs, Pagoda " + Pagoda.version());
                        if (!Pagoda.class.getModule().getName().equals("ai.pagoda")) {
                            System.exit(1);
                        }
                    }
                }
                """);
        warnsOnlyWithoutLeave(java, "--enable-native-access=ai.pagoda", new ArrayList<>(
                List.of("-p", jar.toString(), "--add-modules", "ai.pagoda", program.toString())));
    }
}
