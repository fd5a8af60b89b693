//! The connection to the daemon: `blockd.v1` over its Unix socket, each call bounded in time. The
//! connection is opened on demand, and again after the daemon was away: a plugin outlives any
//! number of daemons.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockd_api::Message as _;
use blockd_api::v1;
use blockd_api::v1::control_client::ControlClient;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status, Streaming};

use crate::error::Error;

/// How long one call may take. The longest but for [`CELL_TIME`] are those that wait for the kernel
/// to add or remove a device, for which the daemon gives itself 20 s.
const CALL_TIME: Duration = Duration::from_secs(60);

/// How long one call about a cell may take. The daemon gives itself 40 s for the answer of another
/// host, 200 s for a lease, and 120 s for each program of LVM. If the plugin gave up before it, an
/// unstage could come while the daemon still attaches.
const CELL_TIME: Duration = Duration::from_secs(600);

/// How long connecting may take: the socket is on this machine.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Largest answer: a list of 65,536 volumes, each with a long name and all labels that it can have.
const MAX_ANSWER: usize = 512 * 1024 * 1024;

/// Flow control window of a stream in bytes, which bounds the answers in flight while the caller
/// does not read: about one message. HTTP/2 allows no less than 65 535.
const STREAM_WINDOW: u32 = 128 * 1024;

/// The same for all streams together: more than there can be, so that none waits for another.
const STREAMS_WINDOW: u32 = 128 * STREAM_WINDOW;

/// How a call ended.
type Answer<T> = Result<Response<T>, Status>;

/// The daemon, which may be away.
#[derive(Clone, Debug)]
pub struct Daemon {
    client: ControlClient<Channel>,
    /// A separate connection: unread messages of a stream must not delay calls.
    streams: ControlClient<Channel>,
    limits: Limits,
    socket: Arc<Path>,
}

/// How long calls may take.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// A call, or the next message of a stream.
    call: Duration,
    /// A call about a cell.
    cell: Duration,
}

/// Calls with one answer, and the limit of that name. All of them can be repeated: one that finds
/// the connection broken, as after a restart of the daemon, is repeated.
macro_rules! calls {
    ($limit:ident; $($name:ident: $request:ident -> $response:ident;)*) => {
        impl Daemon {
            $(
                /// The call of that name.
                ///
                /// # Errors
                /// The daemon's error, or the daemon does not answer.
                pub async fn $name(&self, request: v1::$request) -> Result<v1::$response, Error> {
                    let mut client = self.client.clone();
                    let limit = self.limits.$limit;
                    let mut answer = within(limit, client.$name(request.clone())).await;
                    if answer.as_ref().is_err_and(is_broken) {
                        answer = within(limit, client.$name(request)).await;
                    }
                    answer.map_err(|status| self.failed(&status))
                }
            )*
        }
    };
}

calls! {
    call;
    version: VersionRequest -> VersionResponse;
    list_pools: ListPoolsRequest -> ListPoolsResponse;
    get_pool: GetPoolRequest -> GetPoolResponse;
    create_volume: CreateVolumeRequest -> CreateVolumeResponse;
    delete_volume: DeleteVolumeRequest -> DeleteVolumeResponse;
    get_volume: GetVolumeRequest -> GetVolumeResponse;
    list_volumes: ListVolumesRequest -> ListVolumesResponse;
    resize_volume: ResizeVolumeRequest -> ResizeVolumeResponse;
    configure_volume: ConfigureVolumeRequest -> ConfigureVolumeResponse;
    create_snapshots: CreateSnapshotsRequest -> CreateSnapshotsResponse;
    clone_volume: CloneVolumeRequest -> CloneVolumeResponse;
    attach_volume: AttachVolumeRequest -> AttachVolumeResponse;
    detach_volume: DetachVolumeRequest -> DetachVolumeResponse;
    recover_devices: RecoverDevicesRequest -> RecoverDevicesResponse;
}

calls! {
    cell;
    create_cell: CreateCellRequest -> CreateCellResponse;
    take_cell: TakeCellRequest -> TakeCellResponse;
    stand_by: StandByRequest -> StandByResponse;
    delete_cell: DeleteCellRequest -> DeleteCellResponse;
}

impl Daemon {
    /// The daemon behind this socket. Has to be called in a tokio runtime; does not connect yet.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self::with_limits(socket, Limits { call: CALL_TIME, cell: CELL_TIME })
    }

    fn with_limits(socket: PathBuf, limits: Limits) -> Self {
        let socket: Arc<Path> = socket.into();
        let path = Arc::clone(&socket);
        let connector = tower::service_fn(move |_| {
            let path = Arc::clone(&path);
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // The host is not used, and has to be there.
        let endpoint = Endpoint::from_static("http://blockd.invalid").connect_timeout(CONNECT_TIME);
        let streams = endpoint
            .clone()
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(STREAMS_WINDOW)
            .connect_with_connector_lazy(connector.clone());
        let channel = endpoint.connect_with_connector_lazy(connector);
        let client = ControlClient::new(channel).max_decoding_message_size(MAX_ANSWER);
        Self { client, streams: ControlClient::new(streams), limits, socket }
    }

    /// A volume or snapshot; `None` if there is none of that name.
    ///
    /// # Errors
    /// The daemon's error, or the daemon does not answer.
    pub async fn find_volume(&self, pool: &str, name: &str) -> Result<Option<v1::Volume>, Error> {
        let asked = v1::GetVolumeRequest { name: name.to_owned(), pool: pool.to_owned() };
        match self.get_volume(asked).await {
            Ok(answer) => Ok(answer.volume.filter(is_there)),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All volumes and snapshots of a pool, or of all pools where it has no name.
    ///
    /// # Errors
    /// The daemon's error, or the daemon does not answer.
    pub async fn volumes(&self, pool: &str) -> Result<Vec<v1::Volume>, Error> {
        let asked = v1::ListVolumesRequest { pool: pool.to_owned(), brief: true };
        let mut volumes = self.list_volumes(asked).await?.volumes;
        volumes.retain(is_there);
        Ok(volumes)
    }

    /// Streams the ranges of a volume with their state.
    ///
    /// # Errors
    /// The daemon's error, or the daemon does not answer.
    pub async fn diff_volume(&self, request: v1::DiffVolumeRequest) -> Result<Differences, Error> {
        let mut client = self.streams.clone();
        let mut answer = within(self.limits.call, client.diff_volume(request.clone())).await;
        if answer.as_ref().is_err_and(is_broken) {
            answer = within(self.limits.call, client.diff_volume(request)).await;
        }
        let stream = answer.map_err(|status| self.failed(&status))?;
        Ok(Differences { stream, daemon: self.clone() })
    }

    /// Returns the health of volumes; `None` when the daemon is too old to report it.
    ///
    /// # Errors
    /// The daemon's error, or the daemon does not answer.
    pub async fn find_health(
        &self,
        request: v1::HealthRequest,
    ) -> Result<Option<v1::HealthResponse>, Error> {
        let mut client = self.client.clone();
        let mut answer = within(self.limits.call, client.health(request.clone())).await;
        if answer.as_ref().is_err_and(is_broken) {
            answer = within(self.limits.call, client.health(request)).await;
        }
        match answer {
            Ok(answer) => Ok(Some(answer)),
            Err(status) if status.code() == Code::Unimplemented => Ok(None),
            Err(status) => Err(self.failed(&status)),
        }
    }

    /// Returns volume groups with their cells; none when the daemon is too old to have any.
    ///
    /// # Errors
    /// The daemon's error, or the daemon does not answer.
    pub async fn find_groups(
        &self,
        request: v1::ListVolumeGroupsRequest,
    ) -> Result<Vec<v1::VolumeGroup>, Error> {
        let mut client = self.client.clone();
        let mut answer = within(self.limits.call, client.list_volume_groups(request.clone())).await;
        if answer.as_ref().is_err_and(is_broken) {
            answer = within(self.limits.call, client.list_volume_groups(request)).await;
        }
        match answer {
            Ok(answer) => Ok(answer.groups),
            Err(status) if status.code() == Code::Unimplemented => Ok(Vec::new()),
            Err(status) => Err(self.failed(&status)),
        }
    }

    /// Where it is looked for.
    #[must_use]
    pub fn address(&self) -> String {
        self.socket.display().to_string()
    }

    fn failed(&self, status: &Status) -> Error {
        if !status.details().is_empty()
            && let Ok(detail) = v1::ErrorDetail::decode(status.details())
        {
            return Error::Daemon(Box::new(detail));
        }
        let problem = match status.code() {
            Code::DeadlineExceeded | Code::Cancelled => "no answer in time".to_owned(),
            Code::Unavailable | Code::Unknown => "it is away".to_owned(),
            Code::Unimplemented => "it is older than this plugin".to_owned(),
            code => format!("{code:?}: {}", blockd_csi_base::error::shown(status.message())),
        };
        Error::Unavailable { address: self.address(), problem }
    }
}

/// Bounds a call with its answer: a timeout of the endpoint ends at the headers of the answer.
async fn within<T>(limit: Duration, call: impl Future<Output = Answer<T>>) -> Result<T, Status> {
    let answer = tokio::time::timeout(limit, call).await;
    let late = |_| Status::deadline_exceeded("");
    answer.map_err(late).flatten().map(Response::into_inner)
}

/// Whether a volume is one, or becomes one: overwriting a deleted volume may take a while.
fn is_there(volume: &v1::Volume) -> bool {
    !matches!(volume.state(), v1::VolumeState::Scrubbing | v1::VolumeState::Deleting)
}

/// The messages of a stream of ranges. The daemon's work on it ends when this goes.
#[derive(Debug)]
pub struct Differences {
    stream: Streaming<v1::DiffVolumeResponse>,
    daemon: Daemon,
}

impl Differences {
    /// The next message; `None` after the last.
    ///
    /// # Errors
    /// The daemon's error, or a timeout.
    pub async fn next(&mut self) -> Result<Option<v1::DiffVolumeResponse>, Error> {
        let late = |_| Status::deadline_exceeded("");
        let next = tokio::time::timeout(self.daemon.limits.call, self.stream.message()).await;
        next.map_err(late).flatten().map_err(|status| self.daemon.failed(&status))
    }
}

/// The connection broke, rather than the daemon said something.
fn is_broken(status: &Status) -> bool {
    let code = status.code();
    status.details().is_empty() && matches!(code, Code::Unavailable | Code::Unknown)
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::transport::Server;

    use super::*;

    #[tokio::test]
    async fn a_daemon_that_is_away_is_unavailable() {
        let daemon = Daemon::new(PathBuf::from("/nonexistent/control.sock"));
        let error = daemon.version(v1::VersionRequest {}).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
        assert_eq!(error.to_string(), "blockd at /nonexistent/control.sock: it is away");
    }

    #[tokio::test]
    async fn a_daemon_that_stops_within_its_answer_is_unavailable() {
        let name = format!("blockd-csi-silent-{}", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&socket).unwrap();
        // The headers come, and nothing behind them.
        let silent = axum::Router::new().fallback(|| async {
            let body = tokio_stream::pending::<Result<String, std::io::Error>>();
            ([("content-type", "application/grpc")], axum::body::Body::from_stream(body))
        });
        let mut server = Server::builder();
        let served = server.add_routes(silent.into());
        tokio::spawn(served.serve_with_incoming(UnixListenerStream::new(listener)));
        let limits = Limits { call: Duration::from_millis(100), cell: Duration::from_millis(200) };
        let daemon = Daemon::with_limits(socket.clone(), limits);
        let calls = async {
            [
                daemon.version(v1::VersionRequest {}).await.map(drop),
                daemon.find_health(v1::HealthRequest::default()).await.map(drop),
                daemon.find_groups(v1::ListVolumeGroupsRequest::default()).await.map(drop),
                daemon.take_cell(v1::TakeCellRequest::default()).await.map(drop),
            ]
        };
        let answers = tokio::time::timeout(Duration::from_secs(60), calls).await;
        // Calls of cells go on.
        let long = Limits { cell: CELL_TIME, ..limits };
        let patient = Daemon::with_limits(socket.clone(), long);
        let taken = patient.take_cell(v1::TakeCellRequest::default());
        tokio::time::timeout(Duration::from_secs(1), taken).await.unwrap_err();
        std::fs::remove_file(&socket).unwrap();
        for answer in answers.expect("calls should end") {
            let error = answer.unwrap_err();
            assert_eq!(error.code(), Code::Unavailable);
            let address = daemon.address();
            assert_eq!(error.to_string(), format!("blockd at {address}: no answer in time"));
        }
    }
}
