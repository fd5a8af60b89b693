//! The recorder between a client and an imitation of a plugin: each call passes unchanged, and the
//! file is that of `recording.jsonl`, times aside.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::response::Response;
use blockd_record::schema::{Schema, to_bytes};
use blockd_record::{Options, serve};
use http_body_util::BodyExt as _;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Code;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::{Channel, Endpoint, Server, Uri};
use tower::ServiceExt as _;

/// A folder that goes with its test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("record-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn options(&self) -> Options {
        Options {
            listen: self.0.join("listen"),
            listen_group: None,
            to: self.0.join("to"),
            out: self.0.join("out"),
            callers: vec!["kubelet v1.34.0".to_owned()],
            limit: "64Mi".to_owned(),
        }
    }

    fn text(&self) -> String {
        fs::read_to_string(self.0.join("out")).unwrap()
    }

    async fn wait_for_lines(&self, count: usize) {
        let there = async {
            while self.text().lines().count() < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), there).await.expect("the lines come");
    }

    fn lines(&self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0][..], &length, message].concat()
}

/// A message of the interface in its frame.
fn message(method: &str, is_request: bool, json: &Value) -> Vec<u8> {
    let method = Schema::default().method(method).unwrap();
    let kind = if is_request { method.input() } else { method.output() };
    framed(&to_bytes(&kind, json).unwrap())
}

const CREATE: &str = "/csi.v1.Controller/CreateVolume";
const DELTA: &str = "/csi.v1.SnapshotMetadata/GetMetadataDelta";
const UNSTAGE: &str = "/csi.v1.Node/NodeUnstageVolume";
const PROBE: &str = "/csi.v1.Identity/Probe";
const LATER: &str = "/csi.v9.Later/Method";

/// Answers as a plugin: one volume, two ranges, an error, an echo of what is unknown, and a call
/// without an answer.
async fn plugin(request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let mut response = Response::builder().header("content-type", "application/grpc");
    for (name, value) in request.headers().iter().filter(|(name, _)| name.as_str() == "x-word") {
        response = response.header(name, value);
    }
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let body = match path.as_str() {
        CREATE => message(CREATE, false, &json!({ "volume": { "volume_id": "default/pvc-1" } })),
        DELTA => {
            let range = |offset: i64| {
                let range = json!({ "byte_offset": offset, "size_bytes": 4096 });
                message(DELTA, false, &json!({ "block_metadata": [range] }))
            };
            [range(0), range(8192)].concat()
        }
        LATER => body.to_vec(),
        UNSTAGE => {
            let response = response.header("grpc-status", "9").header("grpc-message", "in%20use");
            return response.body(axum::body::Body::empty()).unwrap();
        }
        _ => std::future::pending().await,
    };
    let mut trailers = axum::http::HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    let body = http_body_util::Full::from(body).with_trailers(async { Some(Ok(trailers)) });
    response.body(axum::body::Body::new(body)).unwrap()
}

/// Serves on threads of its own, so that its connections end with it.
fn serve_plugin(path: &Path) -> Runtime {
    let runtime = Runtime::new().unwrap();
    let listener = {
        let _inside = runtime.enter();
        UnixListener::bind(path).unwrap()
    };
    let routes = Routes::from(Router::new().fallback(plugin));
    let server = Server::builder().add_routes(routes);
    let incoming = UnixListenerStream::new(listener);
    runtime.spawn(async move { server.serve_with_incoming(incoming).await.unwrap() });
    runtime
}

fn client(path: &Path) -> Channel {
    let path = path.to_path_buf();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://test.invalid").connect_with_connector_lazy(connector)
}

/// The body and the code of an answer.
async fn call(channel: &Channel, method: &str, body: Vec<u8>, timeout: &str) -> (Vec<u8>, Code) {
    let request = axum::http::Request::builder().method("POST").uri(method);
    let request = request.header("content-type", "application/grpc").header("te", "trailers");
    let request = request.header("grpc-timeout", timeout).header("x-word", "kept");
    let request = request.body(Body::new(http_body_util::Full::from(body))).unwrap();
    let answered = channel.clone().oneshot(request).await;
    let Ok(answer) = answered else { return (Vec::new(), Code::DeadlineExceeded) };
    let of_headers = tonic::Status::from_header_map(answer.headers());
    if of_headers.is_none() {
        assert_eq!(answer.headers()["x-word"], "kept");
    }
    let body = answer.into_body().collect().await.unwrap();
    let status = body.trailers().and_then(tonic::Status::from_header_map).or(of_headers);
    (body.to_bytes().to_vec(), status.unwrap().code())
}

struct Recording {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

fn record(options: &Options) -> Recording {
    let listener = UnixListener::bind(&options.listen).unwrap();
    let (stop, stopped) = oneshot::channel();
    let options = options.clone();
    let task = tokio::spawn(async move {
        let stopped = async { drop(stopped.await) };
        serve(&options, "blockd-csi 0.0.0", listener, stopped).await.unwrap();
    });
    Recording { stop, task }
}

impl Recording {
    async fn end(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap();
    }
}

/// The text with 0 for each time, and without the path and the operating system's words.
fn without_times(text: &str, path: &str) -> String {
    let mut text = text.replace(path, "PATH");
    for key in ["\"started_unix_ms\":", "\"start_ms\":", "\"end_ms\":"] {
        let mut parts = text.split(key);
        let first = parts.next().unwrap_or_default().to_owned();
        let rest =
            parts.map(|part| part.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.'));
        text = rest.fold(first, |text, part| format!("{text}{key}0{part}"));
    }
    let lines = text.lines().map(|line| match line.split_once("\"PATH: ") {
        Some((begin, _)) => format!("{begin}\"PATH: REASON\"}}\n"),
        None => format!("{line}\n"),
    });
    lines.collect()
}

#[tokio::test]
async fn each_kind_of_call_passes_unchanged_and_has_its_line() {
    let folder = Folder::new("golden");
    let options = folder.options();
    let plugin = serve_plugin(&options.to);
    let recording = record(&options);
    let channel = client(&options.listen);
    let create = json!({
        "name": "pvc-1",
        "capacity_range": { "required_bytes": 1 << 30 },
        "secrets": { "key": "word" },
    });
    let create = message(CREATE, true, &create);
    let (body, code) = call(&channel, CREATE, create, "60S").await;
    let volume = json!({ "volume": { "volume_id": "default/pvc-1" } });
    assert_eq!((body, code), (message(CREATE, false, &volume), Code::Ok));
    let delta = message(DELTA, true, &json!({ "base_snapshot_id": "a", "max_results": 1 }));
    let (body, code) = call(&channel, DELTA, delta, "60S").await;
    assert_eq!((body.len() > 20, code), (true, Code::Ok));
    let unstage = message(UNSTAGE, true, &json!({ "volume_id": "default/pvc-1" }));
    assert_eq!(call(&channel, UNSTAGE, unstage, "2M").await.1, Code::FailedPrecondition);
    // Of a later version of the interface: bytes.
    let later = framed(b"\x0a\x04word");
    assert_eq!(call(&channel, LATER, later.clone(), "60S").await, (later, Code::Ok));
    // On another connection, without an answer.
    let other = client(&options.listen);
    assert_eq!(call(&other, PROBE, framed(b""), "2S").await.1, Code::DeadlineExceeded);
    // The recorder has its line of this call, while the plugin is there.
    folder.wait_for_lines(6).await;
    plugin.shutdown_background();
    fs::remove_file(&options.to).unwrap();
    assert_eq!(call(&other, PROBE, framed(b""), "60S").await.1, Code::Unavailable);
    recording.end().await;

    let text = folder.text();
    for line in folder.lines() {
        let times = ["started_unix_ms", "start_ms", "end_ms"].map(|key| line.get(key));
        assert!(times.iter().flatten().all(|time| time.as_f64().unwrap() > 0.0), "{line}");
    }
    let text = without_times(&text, options.to.to_str().unwrap());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recording.jsonl");
    if std::env::var_os("BLOCKD_WRITE_RECORDING").is_some() {
        fs::write(&path, &text).unwrap();
    }
    assert_eq!(text, fs::read_to_string(&path).unwrap());
    assert!(!text.contains("word"), "a secret is in the recording");
}

#[tokio::test]
async fn calls_beyond_the_limit_pass_and_are_not_recorded() {
    let folder = Folder::new("limit");
    let options = Options { limit: "64Ki".to_owned(), ..folder.options() };
    let plugin = serve_plugin(&options.to);
    let recording = record(&options);
    let channel = client(&options.listen);
    let create = message(CREATE, true, &json!({ "name": "x".repeat(40 << 10) }));
    for _ in 0..3 {
        assert_eq!(call(&channel, CREATE, create.clone(), "60S").await.1, Code::Ok);
    }
    recording.end().await;
    plugin.shutdown_background();
    let lines = folder.lines();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert_eq!(lines[2], json!({ "end": "--limit was reached", "calls": 2 }));
    assert!(fs::metadata(&options.out).unwrap().len() < 64 << 10);
}

#[tokio::test]
async fn a_file_that_exists_is_left_alone() {
    let folder = Folder::new("exists");
    let options = folder.options();
    fs::write(&options.out, "data").unwrap();
    record(&options).end().await;
    assert_eq!(fs::read(&options.out).unwrap(), b"data");
    let recorded = fs::read_to_string(folder.0.join("out.1")).unwrap();
    assert_eq!(recorded.lines().count(), 2, "{recorded}");
    assert!(!options.listen.exists(), "the socket is left behind");
}

/// The disk is full, the folder is gone, or there are too many files: the cluster goes on.
#[tokio::test]
async fn calls_pass_where_no_file_can_be_made() {
    let folder = Folder::new("no-file");
    let options = Options { out: folder.0.join("no/folder"), ..folder.options() };
    let plugin = serve_plugin(&options.to);
    let recording = record(&options);
    let create = message(CREATE, true, &json!({ "name": "pvc-1" }));
    let channel = client(&options.listen);
    assert_eq!(call(&channel, CREATE, create, "60S").await.1, Code::Ok);
    recording.end().await;
    plugin.shutdown_background();
    assert!(!options.listen.exists(), "the socket is left behind");
    // A wrong option is an error still.
    let options = Options { limit: "1".to_owned(), ..options };
    let listener = UnixListener::bind(&options.listen).unwrap();
    let served = serve(&options, "blockd-csi 0.0.0", listener, std::future::pending()).await;
    assert!(served.unwrap_err().to_string().starts_with("--limit is 1: "));
}
