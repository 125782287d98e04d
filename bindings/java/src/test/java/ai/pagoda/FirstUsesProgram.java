package ai.pagoda;

import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicInteger;

/** What LoadingTest runs in a process of its own: classes are first used while another thread loads the native part. */
final class FirstUsesProgram {
    private static final List<String> CLASSES = List.of("Pagoda", "Cancel", "Embeddings", "Engine", "Engine$Ranking",
            "Generator", "KvCache", "KvLease", "Model", "Model$Run", "Store", "Tensor",
            "TokenStream$Generating");
    private static final List<Thread> USERS = new ArrayList<>();
    private static final AtomicInteger USED = new AtomicInteger();

    private FirstUsesProgram() {}

    /** Prints the threads that wait for ever; there are none. */
    public static void main(String[] arguments) throws Exception {
        // Loader asks for this one, and Native is being initialised then.
        Properties asked = new Properties(System.getProperties()) {
            private static final long serialVersionUID = 1;

            @Override
            public String getProperty(String key) {
                if (key.equals("pagoda.native.dir") && USERS.isEmpty()) {
                    useAll();
                }
                return super.getProperty(key);
            }
        };
        System.setProperties(asked);
        Thread loading = using("Native");
        loading.join(20_000);
        for (Thread user : USERS) {
            user.join(1_000);
        }
        USERS.add(loading);
        if (USERS.size() != CLASSES.size() + 1) {
            System.out.println("not one class was used while the native part was loaded");
            Runtime.getRuntime().halt(1);
        }
        List<String> waiting = USERS.stream().filter(Thread::isAlive).map(Thread::getName).toList();
        System.out.println(waiting.isEmpty() ? "it runs, Pagoda " + Pagoda.version() : "these wait: " + waiting);
        // A class that there is not waits for nothing.
        Runtime.getRuntime().halt(waiting.isEmpty() && USED.get() == USERS.size() ? 0 : 1);
    }

    private static void useAll() {
        for (String name : CLASSES) {
            USERS.add(using(name));
        }
        // Those that need the native part are as far as they get without it when they wait in their initialisers.
        long end = System.nanoTime() + 10_000_000_000L;
        while (!USERS.stream().allMatch(user -> !user.isAlive() || initialising(user))) {
            if (System.nanoTime() > end) {
                throw new AssertionError("not every class is being initialised");
            }
            Thread.onSpinWait();
        }
    }

    private static boolean initialising(Thread user) {
        StackTraceElement[] trace = user.getStackTrace();
        return trace.length > 0 && trace[0].getMethodName().equals("<clinit>")
                && trace[0].getClassName().equals("ai.pagoda." + user.getName());
    }

    private static Thread using(String name) {
        Thread user = new Thread(() -> {
            try {
                Class.forName("ai.pagoda." + name);
                USED.incrementAndGet();
            } catch (ClassNotFoundException error) {
                throw new AssertionError(error);
            }
        }, name);
        user.setDaemon(true);
        user.start();
        return user;
    }
}
