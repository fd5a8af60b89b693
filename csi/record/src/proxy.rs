//! Passes requests on as they are: headers, bodies, trailers and cancellations, whatever the
//! method. The bytes that pass are copied to the recording.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::response::Response;
use blockd_csi_base::grpc::parse_timeout;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::{Service as _, ServiceExt as _};

use crate::recording::{Open, Recorder};
use crate::socket::Connection;

/// Bytes of a request of one message: beyond the plugin's own limit of 4 MiB, so that the plugin
/// answers those that are little larger.
const LARGEST_REQUEST: usize = 8 << 20;

/// The way to the plugin.
#[derive(Clone, Debug)]
pub(crate) struct Proxy {
    channel: Channel,
    to: Arc<str>,
    recorder: Arc<Recorder>,
}

/// A call that is written when the last owner has gone: request and response have one each.
#[derive(Debug)]
struct Passing {
    open: Mutex<Open>,
    recorder: Arc<Recorder>,
}

impl Passing {
    /// Notes the end of the call as it passes. Its caller may begin the next call before the last
    /// owner of this one has gone, and these two do not overlap.
    fn end(&self, status: Status) {
        self.recorder.answered(&mut self.open.lock(), status);
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        self.recorder.ended(self.open.get_mut());
    }
}

impl Proxy {
    /// To the plugin with this socket. Connects when there is a call.
    pub(crate) fn new(to: &Path, recorder: Arc<Recorder>) -> Self {
        let socket = to.to_path_buf();
        let connector = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://csi.invalid");
        let channel = endpoint.connect_with_connector_lazy(connector);
        Self { channel, to: to.display().to_string().into(), recorder }
    }

    /// All paths.
    pub(crate) fn routes(self) -> Routes {
        Routes::from(Router::new().fallback(move |request: Request| self.clone().pass(request)))
    }

    async fn pass(mut self, request: Request) -> Result<Response, Infallible> {
        let (parts, body) = request.into_parts();
        let connection = parts.extensions.get::<Connection>().map_or(0, |one| one.0);
        let timeout = parts.headers.get("grpc-timeout").and_then(|text| text.to_str().ok());
        let deadline = timeout.and_then(parse_timeout);
        let open = self.recorder.begin(parts.uri.path(), connection, deadline);
        let recorder = Arc::clone(&self.recorder);
        let call = Arc::new(Passing { open: Mutex::new(open), recorder });
        let body = match self.requested(&call, body).await {
            Ok(body) => body,
            Err(status) => {
                call.end(status.clone());
                return Ok(status.into_http());
            }
        };
        let request = Request::from_parts(parts, body);
        let answered = match self.channel.ready().await {
            Ok(channel) => channel.call(request).await,
            Err(error) => Err(error),
        };
        let response = match answered {
            Ok(response) => response,
            Err(error) => {
                let status = match self.recorder.is_late(&call.open.lock()) {
                    Some(late) => late,
                    None => Status::unavailable(format!("{}: {}", self.to, chain(&error))),
                };
                call.end(status.clone());
                return Ok(status.into_http());
            }
        };
        let (parts, body) = response.into_parts();
        // An answer without a body has its status in the headers.
        if let Some(status) = Status::from_header_map(&parts.headers) {
            call.end(status);
        }
        let body = body.map_frame(move |frame| {
            if let Some(bytes) = frame.data_ref() {
                call.open.lock().response.add(bytes);
            }
            if let Some(status) = frame.trailers_ref().and_then(Status::from_header_map) {
                call.end(status);
            }
            frame
        });
        Ok(Response::from_parts(parts, axum::body::Body::new(body)))
    }

    /// The body of a request. It is read to its end if the method has one message only, so that it
    /// is recorded where the plugin is away; else it is copied as it passes.
    async fn requested(&self, call: &Arc<Passing>, body: axum::body::Body) -> Result<Body, Status> {
        let is_single = self.recorder.has_one_request(&call.open.lock());
        if is_single {
            let read = Limited::new(body, LARGEST_REQUEST).collect().await;
            let bytes = read.map_err(|error| unread(&*error))?;
            let bytes = bytes.to_bytes();
            call.open.lock().request.add(&bytes);
            return Ok(Body::new(Full::new(bytes)));
        }
        let copied = Arc::clone(call);
        Ok(Body::new(body.map_frame(move |frame| {
            if let Some(bytes) = frame.data_ref() {
                copied.open.lock().request.add(bytes);
            }
            frame
        })))
    }
}

/// The answer to a request that can't be read: it is too long, or its caller went away.
fn unread(error: &(dyn std::error::Error + Send + Sync + 'static)) -> Status {
    if error.is::<LengthLimitError>() {
        let text = format!("the request is longer than {LARGEST_REQUEST} bytes");
        return Status::resource_exhausted(text);
    }
    Status::cancelled(format!("the request ended early: {}", chain(error)))
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use std::io;

    use axum::http::HeaderMap;
    use serde_json::Value;
    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::Code;
    use tonic::transport::Server;

    use super::*;
    use crate::Options;

    /// Answers with the status in the headers, or in trailers where the body is not empty.
    async fn plugin(request: Request) -> Response {
        let response = Response::builder().header("content-type", "application/grpc");
        if request.uri().path().ends_with("Refused") {
            return response.header("grpc-status", "9").body(axum::body::Body::empty()).unwrap();
        }
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().unwrap());
        let message = Full::from(&b"\0\0\0\0\0"[..]).with_trailers(async { Some(Ok(trailers)) });
        response.body(axum::body::Body::new(message)).unwrap()
    }

    /// Under load the recorder may drop an answer after its caller has sent the next request.
    #[tokio::test]
    async fn a_call_has_ended_when_its_status_has_passed() {
        let folder = std::env::temp_dir().join(format!("record-end-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (to, out) = (folder.join("to"), folder.join("out"));
        let incoming = UnixListenerStream::new(UnixListener::bind(&to).unwrap());
        let routes = Routes::from(Router::new().fallback(plugin));
        let server = Server::builder().add_routes(routes).serve_with_incoming(incoming);
        let server = tokio::spawn(server);
        let (listen, limit) = (folder.join("listen"), "64Mi".to_owned());
        let options = Options { listen, listen_group: None, to, out, callers: Vec::new(), limit };
        let recorder = Arc::new(Recorder::create(&options, "a test").unwrap());
        let proxy = Proxy::new(&options.to, Arc::clone(&recorder));
        let mut late = Vec::new();
        for name in ["Answered", "Refused", "Answered"] {
            let request = Request::builder().method("POST").uri(format!("/csi.v9.Later/{name}"));
            let request = request.header("content-type", "application/grpc");
            let request = request.body(axum::body::Body::empty()).unwrap();
            let mut answer = proxy.clone().pass(request).await.unwrap();
            while answer.body_mut().frame().await.is_some() {}
            late.push(answer);
        }
        drop(late);
        recorder.end("the test is over");
        server.abort();
        let text = std::fs::read_to_string(&options.out).unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let time = |line: usize, key: &str| lines[line][key].as_f64().unwrap();
        assert_eq!(
            [1, 2, 3].map(|line| lines[line]["code"].as_str()),
            [Some("OK"), Some("FAILED_PRECONDITION"), Some("OK")]
        );
        assert!(time(1, "end_ms") <= time(2, "start_ms"), "{text}");
        assert!(time(2, "end_ms") <= time(3, "start_ms"), "{text}");
    }

    #[tokio::test]
    async fn only_a_request_that_is_too_long_exhausts_something() {
        let long = Limited::new(Full::new(&b"four"[..]), 3).collect().await.unwrap_err();
        assert_eq!(unread(&*long).code(), Code::ResourceExhausted);
        let reset = unread(&io::Error::from(io::ErrorKind::ConnectionReset));
        assert_eq!(reset.code(), Code::Cancelled);
        assert!(reset.message().starts_with("the request ended early: "), "{reset}");
    }
}
