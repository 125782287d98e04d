package pagoda_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"pagoda"
)

// Everything here is made by `make test-go`, from the root of the repository.
const (
	root  = "../.."
	hello = root + "/target/demo/hello.onnx"
	model = root + "/target/demo/model.onnx"
	data  = root + "/tests/data/engine"
)

var ctx = context.Background()

func TestMain(m *testing.M) {
	for _, path := range []string{hello, model, data} {
		if _, err := os.Stat(path); err != nil {
			fmt.Fprintf(os.Stderr, "%v: run `make test-go` in the root of the repository\n", err)
			os.Exit(1)
		}
	}
	code := m.Run()
	// What tests have forgotten to close is closed for them; nothing may be left after that.
	if live := settled(0); live != 0 && code == 0 {
		fmt.Fprintf(os.Stderr, "%d objects are still held\n", live)
		code = 1
	}
	os.Exit(code)
}

// settled waits until so many objects are held; it returns how many there are.
func settled(wanted int) int {
	for range 500 {
		if pagoda.LiveObjects() == wanted {
			break
		}
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
	}
	return pagoda.LiveObjects()
}

// eventually waits until a condition holds that another thread brings about.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not after 30 seconds: %s", what)
		}
	}
}

// must is a value of which no error is expected.
func must[T any](t testing.TB) func(value T, err error) T {
	return func(value T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, not %v", what, got, want)
	}
}

// fails checks that an error has a code and is about an argument.
func fails(t testing.TB, err error, code pagoda.Status, argument string) {
	t.Helper()
	var e *pagoda.Error
	switch {
	case !errors.As(err, &e):
		t.Errorf("%v, where %v about %q is due", err, code, argument)
	case !errors.Is(err, code) || e.Argument != argument || e.Message == "":
		t.Errorf("%v about %q (%v), where %v about %q is due", e.Status, e.Argument, err, code, argument)
	}
}

// The tests run on the CPU with one thread, wherever they run.
func cpu() *pagoda.ModelOptions {
	return &pagoda.ModelOptions{Provider: pagoda.ProviderCPU, IntraOpThreads: 1, SleepWhenIdle: true}
}

func open(t testing.TB, path string) *pagoda.Model {
	t.Helper()
	m := must[*pagoda.Model](t)(pagoda.OpenModel(ctx, path, cpu()))
	t.Cleanup(func() { ok(t, m.Close()) })
	return m
}

func tensor[T pagoda.Element](t testing.TB, dims []int64, values []T) *pagoda.Tensor {
	t.Helper()
	it := must[*pagoda.Tensor](t)(pagoda.NewTensor(dims, values))
	t.Cleanup(func() { ok(t, it.Close()) })
	return it
}

// table writes rows of two numbers, the key and its negative, for the keys 1 to 4, in HugeCTR's format, and a
// configuration; it returns the path of that, and the rest of an element of its models.
func table(t testing.TB) (path, rest string) {
	t.Helper()
	folder := t.TempDir()
	var keys, rows []byte
	for key := int64(1); key <= 4; key++ {
		keys = must[[]byte](t)(binary.Append(keys, binary.LittleEndian, key))
		rows = must[[]byte](t)(binary.Append(rows, binary.LittleEndian, []float32{float32(key), -float32(key)}))
	}
	rest = `"sparse_files": ["."], "embedding_table_names": ["t"], "embedding_vecsize_per_table": [2],
		"default_value_for_each_table": [[7, 8]], "gpucacheper": 1.0, "hit_rate_threshold": 1.0}`
	path = filepath.Join(folder, "ps.json")
	ok(t, os.WriteFile(filepath.Join(folder, "key"), keys, 0o644))
	ok(t, os.WriteFile(filepath.Join(folder, "emb_vector"), rows, 0o644))
	ok(t, os.WriteFile(path, []byte(`{"models": [{"model": "m", `+rest+`]}`), 0o644))
	return path, rest
}
