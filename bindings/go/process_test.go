package pagoda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestVersions(t *testing.T) {
	if err := checkABI(ABIVersion()); err != nil || loaded() != nil {
		t.Errorf("%v, %v", err, loaded())
	}
	err := checkABI(99)
	var e *Error
	if !errors.As(err, &e) || e.Status != ErrUnsupported || !strings.Contains(err.Error(), "99") {
		t.Errorf("%v", err)
	}
	parts := fmt.Sprintf("%d.%d.%d", HeaderVersionMajor, HeaderVersionMinor, HeaderVersionPatch)
	if Version() != HeaderVersion || parts != HeaderVersion || VersionNumber() != HeaderVersionNumber {
		t.Errorf("%q and %d, not %q and %d", Version(), VersionNumber(), HeaderVersion, HeaderVersionNumber)
	}
}

func TestStatuses(t *testing.T) {
	for status, name := range map[Status]string{
		ErrInvalidArgument: "INVALID_ARGUMENT", ErrInvalidHandle: "INVALID_HANDLE", ErrNotFound: "NOT_FOUND",
		ErrUnsupported: "UNSUPPORTED", ErrCapacity: "CAPACITY", ErrCancelled: "CANCELLED", ErrModel: "MODEL",
		ErrRuntime: "RUNTIME", ErrIO: "IO", ErrInternal: "INTERNAL", ErrBusy: "BUSY", 99: "UNKNOWN",
	} {
		if status.Error() != "pagoda: "+name {
			t.Errorf("%v, not %s", status, name)
		}
	}
	err := error(fail(ErrIO, "path", "%d", 7))
	if !errors.Is(err, ErrIO) || errors.Is(err, ErrBusy) || errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err.Error() != "pagoda: path: 7" {
		t.Errorf("%v", err)
	}
}

func TestMetrics(t *testing.T) {
	metrics, err := Metrics()
	if err != nil || !strings.Contains(metrics, "# TYPE pagoda_") || strings.Contains(metrics, "\x00") {
		t.Errorf("%v: %q", err, metrics)
	}
}

func TestLog(t *testing.T) {
	var lines, wrong atomic.Int32
	count := func(level LogLevel, source, message string) {
		lines.Add(1)
		if level < LogLevelError || level > LogLevelDebug || source == "" || message == "" {
			wrong.Add(1)
		}
	}
	defer SetLog(LogLevelOff, nil)
	if err := SetLog(LogLevelDebug, count); err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	if _, err := OpenModel(ctx, "no such file.onnx", nil); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	if lines.Load() == 0 || wrong.Load() != 0 {
		t.Errorf("%d lines, %d wrong", lines.Load(), wrong.Load())
	}
	// What can not be set leaves what was.
	if err := SetLog(99, count); !errors.Is(err, ErrInvalidArgument) {
		t.Error(err)
	}
	before := lines.Load()
	OpenModel(ctx, "no such file.onnx", nil)
	if lines.Load() == before {
		t.Error("the log has stopped")
	}
	if err := SetLog(LogLevelOff, nil); err != nil {
		t.Error(err)
	}
	before = lines.Load()
	OpenModel(ctx, "no such file.onnx", nil)
	if lines.Load() != before {
		t.Error("the log goes on")
	}
	// Set and used at the same time.
	var group sync.WaitGroup
	for range 4 {
		group.Add(2)
		go func() {
			defer group.Done()
			for range 50 {
				SetLog(LogLevelDebug, count)
			}
		}()
		go func() {
			defer group.Done()
			for range 50 {
				OpenModel(ctx, "no such file.onnx", nil)
			}
		}()
	}
	group.Wait()
	for level, name := range map[LogLevel]string{LogLevelOff: "off", LogLevelTrace: "trace", 99: "unknown", -1: "unknown"} {
		if level.String() != name {
			t.Errorf("%v, not %s", level, name)
		}
	}
}

// A panic in the function that gets the log ends the program as any other does, and does not unwind the library.
func TestAPanicInTheLogEndsTheProgram(t *testing.T) {
	if os.Getenv("PAGODA_GO_PANIC") != "" {
		SetLog(LogLevelDebug, func(LogLevel, string, string) { panic("the log is full") })
		OpenModel(context.Background(), "no such file.onnx", nil)
		time.Sleep(time.Minute)
		return
	}
	program := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	program.Env = append(os.Environ(), "PAGODA_GO_PANIC=1")
	output, err := program.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(string(output), "panic: the log is full") {
		t.Errorf("%v: %s", err, output)
	}
}

func TestAwait(t *testing.T) {
	failed := errors.New("failed")
	soon, cancel := context.WithCancel(context.Background())
	if value, err := await(soon, func() (int, error) { return 7, failed }, nil); value != 7 || err != failed {
		t.Errorf("%d, %v", value, err)
	}
	// A call that is left goes on, and what it returns is discarded.
	begun, end, discarded := make(chan struct{}), make(chan struct{}), make(chan int)
	go func() { <-begun; cancel() }()
	call := func() (int, error) { close(begun); <-end; return 7, nil }
	_, err := await(soon, call, func(value int) { discarded <- value })
	if !errors.Is(err, ErrCancelled) || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	close(end)
	select {
	case value := <-discarded:
		if value != 7 {
			t.Error(value)
		}
	case <-time.After(time.Minute):
		t.Error("nothing was discarded")
	}
	call = func() (int, error) { t.Error("called"); return 0, nil }
	if _, err := await(soon, call, nil); !errors.Is(err, ErrCancelled) {
		t.Error(err)
	}
}
