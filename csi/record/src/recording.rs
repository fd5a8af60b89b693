//! The lines of a recording, and the file that they are written to.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_csi_base::clock::{Clock, unix_time};
use blockd_csi_base::error::Invalid;
use blockd_csi_base::grpc::code_name;
use parking_lot::Mutex;
use prost_reflect::MethodDescriptor;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::Options;
use crate::frames::{Body, Messages};
use crate::schema::Schema;

/// Version of the format. It changes when a reader of the former one would be wrong; new fields
/// alone do not change it.
pub const VERSION: u32 = 1;

/// The key of the only field of a message that is not shown: its bytes.
pub const UNREAD: &str = "@bytes";

/// Files of one `--out`. A recorder that was started more often is in trouble that more files do
/// not show.
const MOST_FILES: u32 = 100;

/// Bytes that are kept free for the last line.
const LAST_LINE_BYTES: u64 = 1 << 10;

/// The first line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Version of the format.
    pub recording: u32,
    /// The program that wrote the file, and its version: the plugin's too, as both are one program.
    pub recorder: String,
    /// Callers and their versions, as the user has named them.
    pub callers: Vec<String>,
    /// The host's clock at the start, for a comparison with logs.
    pub started_unix_ms: u64,
    /// The file was written by hand, and not recorded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub synthetic: bool,
    /// The subject of a synthetic file.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// Where a synthetic file has its order of calls from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    /// The kernel that a synthetic file is for, where another one behaves differently.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// Pauses of a replay as a part of those of the file and of its callers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_scale: Option<f64>,
}

/// A call that has ended. Calls are written as they end, so their order is that of `call`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// Its number by its start, from 1.
    pub call: u64,
    /// Number of the caller's connection, from 1.
    pub connection: u64,
    /// Milliseconds from the start of the recording to its own.
    pub start_ms: f64,
    /// The same to its end.
    pub end_ms: f64,
    /// Its path in gRPC.
    pub method: String,
    /// The caller's deadline, in milliseconds from the start of the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// The request.
    #[serde(default)]
    pub request: Value,
    /// The answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response: Option<Value>,
    /// The answers of a method that has many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub responses: Option<Value>,
    /// How it ended.
    pub code: String,
    /// The text of an error.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// The last line of a complete file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// Why no more was recorded.
    pub end: String,
    /// Calls that began.
    pub calls: u64,
}

/// Writes a recording while calls pass.
#[derive(Debug)]
pub(crate) struct Recorder {
    schema: Schema,
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` once the recording is over.
    file: Option<File>,
    /// Bytes that may still be written before the last line.
    room: u64,
    calls: u64,
}

impl Recorder {
    /// Makes the file, for its user alone, and writes the header. Where that fails, calls pass
    /// without a recording: a full disk must not keep the callers from the plugin.
    ///
    /// # Errors
    /// An option is wrong.
    pub(crate) fn create(options: &Options, program: &str) -> Result<Self, Invalid> {
        options.check()?;
        let room = options.limit_bytes()?.saturating_sub(LAST_LINE_BYTES);
        let mut state = State { file: None, room, calls: 0 };
        let header = Header {
            recording: VERSION,
            recorder: program.to_owned(),
            callers: options.callers.clone(),
            started_unix_ms: u64::try_from(unix_time().as_millis()).unwrap_or_default(),
            ..Header::default()
        };
        match state.begin(&options.out, &header) {
            Ok(path) => tracing::info!(path = %path.display(), version = program, "recording"),
            Err(error) => {
                let out = options.out.display();
                tracing::error!(%out, %error, "cannot make --out; calls are passed on, unrecorded");
                state.file = None;
            }
        }
        Ok(Self { schema: Schema::default(), clock: Clock::start(), state: Mutex::new(state) })
    }

    /// Begins a call.
    pub(crate) fn begin(&self, method: &str, connection: u64, deadline: Option<Duration>) -> Open {
        let mut state = self.state.lock();
        state.calls += 1;
        Open {
            call: state.calls,
            connection,
            start: self.clock.elapsed(),
            method: method.to_owned(),
            deadline,
            request: Body::default(),
            response: Body::default(),
            status: None,
            end: None,
        }
    }

    /// Sets the status of a call, which ends it.
    pub(crate) fn answered(&self, open: &mut Open, status: Status) {
        open.status = Some(status);
        open.end = Some(self.clock.elapsed());
    }

    /// Whether the interface has the method of a call, with one message for each request.
    pub(crate) fn has_one_request(&self, open: &Open) -> bool {
        self.schema.method(&open.method).is_some_and(|method| !method.is_client_streaming())
    }

    /// The end of a call, if its deadline has passed.
    pub(crate) fn is_late(&self, open: &Open) -> Option<Status> {
        open.is_late(self.clock.elapsed())
    }

    /// Writes a call that has ended.
    pub(crate) fn ended(&self, open: &Open) {
        let end = open.end.unwrap_or_else(|| self.clock.elapsed());
        let method = self.schema.method(&open.method);
        let status = open.status.clone().unwrap_or_else(|| open.unanswered(end));
        let is_stream = method.as_ref().is_some_and(MethodDescriptor::is_server_streaming);
        let single = |all: Value| match all {
            Value::Array(mut all) => all.pop(),
            other => Some(other),
        };
        let answered = (status.code() == Code::Ok || open.response.total() > 0)
            .then(|| self.shown(method.as_ref(), MethodDescriptor::output, &open.response));
        let request = self.shown(method.as_ref(), MethodDescriptor::input, &open.request);
        let line = Call {
            call: open.call,
            connection: open.connection,
            start_ms: milliseconds(open.start),
            end_ms: milliseconds(end),
            method: open.method.clone(),
            deadline_ms: open.deadline.and_then(|it| u64::try_from(it.as_millis()).ok()),
            request: single(request).unwrap_or_default(),
            responses: answered.clone().filter(|_| is_stream),
            response: answered.filter(|_| !is_stream).and_then(single),
            code: code_name(status.code()).to_owned(),
            message: status.message().to_owned(),
        };
        let mut state = self.state.lock();
        let room = state.room;
        match state.write(&line, room) {
            Ok(true) => {}
            Ok(false) => {
                tracing::warn!("the recording has reached --limit; calls are passed on");
                state.end("--limit was reached");
            }
            Err(error) => {
                tracing::error!(%error, "cannot write --out; calls are passed on");
                state.file = None;
            }
        }
    }

    /// The messages of a body: a list, or the number of bytes.
    fn shown(
        &self,
        method: Option<&MethodDescriptor>,
        part: impl Fn(&MethodDescriptor) -> prost_reflect::MessageDescriptor,
        body: &Body,
    ) -> Value {
        // A message of another method may hold secrets that nothing marks.
        let unread = |bytes: u64| json!({ UNREAD: bytes });
        let (Some(method), Messages::Whole(all)) = (method, body.messages()) else {
            return unread(body.total());
        };
        let all = all.iter().map(|bytes| self.schema.to_json(&part(method), bytes));
        let all: Result<Vec<Value>, _> = all.collect();
        all.map_or_else(|_| unread(body.total()), Value::Array)
    }

    /// Ends the recording. Returns the number of calls.
    pub(crate) fn end(&self, why: &str) -> u64 {
        let mut state = self.state.lock();
        state.end(why);
        state.calls
    }
}

/// Makes the file. One that is there is left as it is, and a number is added to the name: a
/// recorder that is started again must not keep the callers from the plugin.
fn new_file(out: &Path) -> std::io::Result<(PathBuf, File)> {
    let numbered = (1..MOST_FILES).map(|number| {
        let mut path = out.as_os_str().to_owned();
        path.push(format!(".{number}"));
        PathBuf::from(path)
    });
    let mut paths = std::iter::once(out.to_path_buf()).chain(numbered).peekable();
    while let Some(path) = paths.next() {
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists && paths.peek().is_some() => {}
            Err(error) => return Err(error),
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

impl State {
    /// Makes the file, and writes the header. Returns the file's path.
    fn begin(&mut self, out: &Path, header: &Header) -> std::io::Result<PathBuf> {
        let (path, file) = new_file(out)?;
        self.file = Some(file);
        self.write(header, u64::MAX)?;
        Ok(path)
    }

    /// Writes a line, unless it does not fit into `room`.
    fn write(&mut self, line: &impl Serialize, room: u64) -> std::io::Result<bool> {
        let Some(file) = &mut self.file else { return Ok(true) };
        let text = format!("{}\n", serde_json::to_string(line)?);
        let length = u64::try_from(text.len()).unwrap_or(u64::MAX);
        if length > room {
            return Ok(false);
        }
        // At once, so that a killed recorder leaves whole lines.
        file.write_all(text.as_bytes())?;
        self.room = self.room.saturating_sub(length);
        Ok(true)
    }

    fn end(&mut self, why: &str) {
        let line = End { end: why.to_owned(), calls: self.calls };
        if let Err(error) = self.write(&line, u64::MAX) {
            tracing::error!(%error, "cannot write --out");
        }
        self.file = None;
    }
}

/// A call that passes.
#[derive(Debug)]
pub(crate) struct Open {
    call: u64,
    connection: u64,
    start: Duration,
    method: String,
    deadline: Option<Duration>,
    pub(crate) request: Body,
    pub(crate) response: Body,
    /// How it has ended, once that has passed.
    status: Option<Status>,
    /// When that passed.
    end: Option<Duration>,
}

impl Open {
    fn is_late(&self, now: Duration) -> Option<Status> {
        let spent = now.saturating_sub(self.start);
        let is_late = self.deadline.is_some_and(|limit| spent >= limit);
        is_late.then(|| Status::deadline_exceeded("no answer before the caller's deadline"))
    }

    /// The end of a call whose end did not pass.
    fn unanswered(&self, now: Duration) -> Status {
        let gone = "no answer before the caller or the recorder disconnected";
        let later = self.deadline.map_or(Duration::ZERO, seen_later);
        self.is_late(now.saturating_add(later)).unwrap_or_else(|| Status::cancelled(gone))
    }
}

/// The recorder reads a request later than its caller has sent it, and so sees a call that is given
/// up at the caller's deadline as a little shorter than that. A tenth of the deadline, at most 1 s:
/// longer than a busy machine takes to pass a request on, and a caller that gives up for another
/// reason seldom does so just then.
fn seen_later(deadline: Duration) -> Duration {
    (deadline / 10).min(Duration::from_secs(1))
}

fn milliseconds(time: Duration) -> f64 {
    // Whole microseconds: a call takes several.
    (time.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_given_up_at_its_deadline_is_late_though_it_was_seen_later() {
        let given_up = |deadline: Option<u64>, after: u64| {
            let open = Open {
                call: 1,
                connection: 1,
                start: Duration::from_secs(7),
                method: String::new(),
                deadline: deadline.map(Duration::from_millis),
                request: Body::default(),
                response: Body::default(),
                status: None,
                end: None,
            };
            open.unanswered(open.start + Duration::from_millis(after)).code()
        };
        let [late, cancelled] = [Code::DeadlineExceeded, Code::Cancelled];
        assert_eq!([1800, 1799].map(|after| given_up(Some(2000), after)), [late, cancelled]);
        assert_eq!([59_000, 58_999].map(|after| given_up(Some(60_000), after)), [late, cancelled]);
        assert_eq!(given_up(Some(0), 0), late);
        assert_eq!(given_up(None, 3_600_000), cancelled);
    }
}
