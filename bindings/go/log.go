package pagoda

// #include "bridge.h"
import "C"

import (
	"reflect"
	"runtime/cgo"
	"strings"
	"sync"
	"sync/atomic"
)

// LogLevel is how much is logged.
type LogLevel int32

// How much is logged, from nothing to everything.
const (
	LogLevelOff   LogLevel = C.PAGODA_LOG_LEVEL_OFF   // Nothing.
	LogLevelError LogLevel = C.PAGODA_LOG_LEVEL_ERROR // What failed, above all where there is no caller to tell.
	LogLevelWarn  LogLevel = C.PAGODA_LOG_LEVEL_WARN  // What is likely not as the caller wants it.
	LogLevelInfo  LogLevel = C.PAGODA_LOG_LEVEL_INFO  // What happens rarely and is good to know.
	LogLevelDebug LogLevel = C.PAGODA_LOG_LEVEL_DEBUG // What helps to find a mistake: errors that calls return, forgotten Closes.
	LogLevelTrace LogLevel = C.PAGODA_LOG_LEVEL_TRACE // Everything.
)

// String is the name of the level, such as "warn".
func (l LogLevel) String() string {
	if names := [...]string{"off", "error", "warn", "info", "debug", "trace"}; l >= 0 && int(l) < len(names) {
		return names[l]
	}
	return "unknown"
}

// logger is where the log goes.
type logger struct {
	level LogLevel
	line  func(level LogLevel, source, message string)
}

var (
	logging sync.Mutex // held by SetLog
	current cgo.Handle // of the logger that C has; 0: none
	toGo    atomic.Pointer[logger]
)

// SetLog has the log of Pagoda and of ONNX Runtime sent to line, up to level; nil stops it. Until then nothing is
// logged.
//
// line is called from any thread, often from several at once, and while it runs the library waits: it must be quick,
// and must not call SetLog or open anything. source says who speaks, such as "onnxruntime". When SetLog returns, the
// function of before is not called any more by the library.
func SetLog(level LogLevel, line func(level LogLevel, source, message string)) error {
	if err := loaded(); err != nil {
		return err
	}
	logging.Lock()
	defer logging.Unlock()
	var next cgo.Handle
	var to *logger
	if line != nil {
		to = &logger{level, line}
		next = cgo.NewHandle(to)
	}
	var failure *C.pagoda_error
	if err := check(C.pagoda_go_log_set(C.pagoda_log_level(level), C.uintptr_t(next), &failure), &failure); err != nil {
		if next != 0 {
			next.Delete()
		}
		return err
	}
	toGo.Store(to)
	if current != 0 {
		current.Delete()
	}
	current = next
	return nil
}

//export pagodaGoLogged
func pagodaGoLogged(held C.uintptr_t, level C.pagoda_log_level, source, message *C.char) {
	to := cgo.Handle(held).Value().(*logger)
	to.log(LogLevel(level), C.GoString(source), C.GoString(message))
}

// log calls the function of the user. A panic of it must not unwind the library, whose frames lie below ours: it ends
// the program as a panic without a recover does, from a goroutine of its own.
func (l *logger) log(level LogLevel, source, message string) {
	defer func() {
		if problem := recover(); problem != nil {
			go panic(problem)
		}
	}()
	l.line(level, source, message)
}

// logs tells whether lines of a level go anywhere.
func logs(level LogLevel) bool {
	to := toGo.Load()
	return to != nil && level <= to.level
}

// logLine is for what this package itself has to say.
func logLine(level LogLevel, source, message string) {
	if to := toGo.Load(); to != nil && level <= to.level {
		to.log(level, source, message)
	}
}

var packagePrefix = reflect.TypeFor[Model]().PkgPath() + "."

// inPackage tells whether a function is one of this package.
func inPackage(function string) bool { return strings.HasPrefix(function, packagePrefix) }
