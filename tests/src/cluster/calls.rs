//! Calls to a plugin by their path and bytes, over numbered connections.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_record::frames::{Body, Messages};
use blockd_record::schema::{Schema, to_bytes};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

/// A call without a deadline is given up by the replay after this time.
const LIMIT: Duration = Duration::from_secs(300);

/// The answer to a call.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) status: Status,
    /// The messages.
    pub(super) messages: Vec<Value>,
}

/// Connections to a plugin.
#[derive(Debug)]
pub(super) struct Calls {
    runtime: Runtime,
    schema: Schema,
    socket: PathBuf,
    channels: Mutex<BTreeMap<u64, Channel>>,
}

impl Calls {
    /// To the plugin with this socket.
    pub(super) fn new(socket: &Path) -> Result<Arc<Self>> {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).enable_all().build()?;
        let (schema, socket) = (Schema::default(), socket.to_path_buf());
        Ok(Arc::new(Self { runtime, schema, socket, channels: Mutex::default() }))
    }

    fn channel(&self, connection: u64) -> Channel {
        let _inside = self.runtime.enter();
        let mut channels = self.channels.lock().unwrap_or_else(|error| error.into_inner());
        let channel = channels.entry(connection).or_insert_with(|| {
            let to = self.socket.clone();
            let connector = tower::service_fn(move |_: Uri| {
                let to = to.clone();
                async move { UnixStream::connect(to).await.map(TokioIo::new) }
            });
            Endpoint::from_static("http://csi.invalid").connect_with_connector_lazy(connector)
        });
        channel.clone()
    }

    /// Closes all connections.
    pub(super) fn disconnect(&self) {
        self.channels.lock().unwrap_or_else(|error| error.into_inner()).clear();
    }

    /// Makes a call. Methods that the interface lacks are sent without a message.
    ///
    /// # Errors
    /// The request is no message of the method.
    pub(super) fn call(
        &self,
        connection: u64,
        path: &str,
        request: &Value,
        deadline: Option<Duration>,
    ) -> Result<Answer> {
        let method = self.schema.method(path);
        let bytes = match &method {
            Some(method) => to_bytes(&method.input(), request)?,
            None => Vec::new(),
        };
        let mut framed = vec![0];
        framed.extend(u32::try_from(bytes.len())?.to_be_bytes());
        framed.extend(bytes);
        let channel = self.channel(connection);
        let called = async {
            let limit = deadline.unwrap_or(LIMIT);
            let late = |_| Status::deadline_exceeded("no answer before the deadline");
            tokio::time::timeout(limit, exchange(channel, path, framed, deadline))
                .await
                .unwrap_or_else(|error| (Body::default(), late(error)))
        };
        let (body, status) = self.runtime.block_on(called);
        let messages = match (body.messages(), &method) {
            (Messages::Whole(all), Some(method)) => {
                let all = all.iter().map(|bytes| self.schema.to_json(&method.output(), bytes));
                all.collect::<Result<_, _>>().context("reading an answer")?
            }
            _ => vec![json!({ "@bytes": body.total() })],
        };
        Ok(Answer { status, messages })
    }
}

async fn exchange(
    channel: Channel,
    path: &str,
    bytes: Vec<u8>,
    deadline: Option<Duration>,
) -> (Body, Status) {
    use tower::ServiceExt as _;
    let mut body = Body::default();
    let request = tonic::codegen::http::Request::builder().method("POST").uri(path);
    let mut request = request.header("content-type", "application/grpc").header("te", "trailers");
    if let Some(limit) = deadline {
        // Eight digits at most.
        let millis = limit.as_millis().min(99_999_999);
        request = request.header("grpc-timeout", format!("{millis}m"));
    }
    let sent = http_body_util::Full::from(bytes);
    let Ok(request) = request.body(tonic::body::Body::new(sent)) else {
        return (body, Status::internal("the path is none"));
    };
    let answer = match channel.oneshot(request).await {
        Ok(answer) => answer,
        Err(error) => return (body, status_of(&error)),
    };
    let of_headers = Status::from_header_map(answer.headers());
    let read = http_body_util::BodyExt::collect(answer.into_body()).await;
    match read {
        Ok(read) => {
            let status = read.trailers().and_then(Status::from_header_map).or(of_headers);
            body.add(&read.to_bytes());
            let none = || Status::unknown("an answer without a status");
            (body, status.unwrap_or_else(none))
        }
        Err(status) => (body, status),
    }
}

/// The status of a call without an answer, as a client of gRPC has it.
fn status_of(error: &tonic::transport::Error) -> Status {
    let mut causes =
        std::iter::successors(Some(error as &dyn std::error::Error), |one| one.source());
    let is_late = causes.any(|one| one.is::<tonic::TimeoutExpired>());
    let code = if is_late { Code::DeadlineExceeded } else { Code::Unavailable };
    Status::new(code, error.to_string())
}
