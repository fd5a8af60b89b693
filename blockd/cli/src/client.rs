//! The connection to the daemon: gRPC over its Unix socket, each call with a deadline.

use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_api::v1;
use blockd_api::v1::control_client::ControlClient;
use blockd_media::error::Error;
use blockd_media::names::MAX_SOCKET_PATH;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use crate::transfer::progress::awaited;

/// A daemon that answers.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    inner: ControlClient<Channel>,
    socket: PathBuf,
    timeout: Duration,
    /// Whether a call that takes long may say so on a terminal.
    shows_waits: bool,
}

/// Calls with one answer. Each gives up when the daemon does not answer in time.
macro_rules! calls {
    ($($name:ident: $request:ident -> $response:ident;)*) => {
        impl Client {
            $(
                pub(crate) async fn $name(
                    &mut self,
                    request: v1::$request,
                ) -> Result<v1::$response, Error> {
                    let call = within(self.timeout, self.inner.$name(request));
                    let answer = awaited(self.shows_waits, call).await;
                    answer.map(tonic::Response::into_inner).map_err(|status| self.failed(&status))
                }
            )*
        }
    };
}

calls! {
    version: VersionRequest -> VersionResponse;
    list_pools: ListPoolsRequest -> ListPoolsResponse;
    get_pool: GetPoolRequest -> GetPoolResponse;
    create_pool: CreatePoolRequest -> CreatePoolResponse;
    open_pool: OpenPoolRequest -> OpenPoolResponse;
    close_pool: ClosePoolRequest -> ClosePoolResponse;
    delete_pool: DeletePoolRequest -> DeletePoolResponse;
    export_pool: ExportPoolRequest -> ExportPoolResponse;
    rename_pool: RenamePoolRequest -> RenamePoolResponse;
    import_pool: ImportPoolRequest -> ImportPoolResponse;
    create_volume: CreateVolumeRequest -> CreateVolumeResponse;
    add_volume: AddVolumeRequest -> AddVolumeResponse;
    delete_volume: DeleteVolumeRequest -> DeleteVolumeResponse;
    get_volume: GetVolumeRequest -> GetVolumeResponse;
    list_volumes: ListVolumesRequest -> ListVolumesResponse;
    resize_volume: ResizeVolumeRequest -> ResizeVolumeResponse;
    configure_volume: ConfigureVolumeRequest -> ConfigureVolumeResponse;
    grow_pool: GrowPoolRequest -> GrowPoolResponse;
    fold_pool: FoldPoolRequest -> FoldPoolResponse;
    add_pool_device: AddPoolDeviceRequest -> AddPoolDeviceResponse;
    remove_pool_device: RemovePoolDeviceRequest -> RemovePoolDeviceResponse;
    rebalance_pool: RebalancePoolRequest -> RebalancePoolResponse;
    set_pool_feature: SetPoolFeatureRequest -> SetPoolFeatureResponse;
    create_snapshots: CreateSnapshotsRequest -> CreateSnapshotsResponse;
    clone_volumes: CloneVolumesRequest -> CloneVolumesResponse;
    rollback_volume: RollbackVolumeRequest -> RollbackVolumeResponse;
    reset_volume: ResetVolumeRequest -> ResetVolumeResponse;
    rename_volume: RenameVolumeRequest -> RenameVolumeResponse;
    attach_volume: AttachVolumeRequest -> AttachVolumeResponse;
    detach_volume: DetachVolumeRequest -> DetachVolumeResponse;
    recover_devices: RecoverDevicesRequest -> RecoverDevicesResponse;
    list_connections: ListConnectionsRequest -> ListConnectionsResponse;
    stats: StatsRequest -> StatsResponse;
    space: SpaceRequest -> SpaceResponse;
    add_volume_group: AddVolumeGroupRequest -> AddVolumeGroupResponse;
    remove_volume_group: RemoveVolumeGroupRequest -> RemoveVolumeGroupResponse;
    list_volume_groups: ListVolumeGroupsRequest -> ListVolumeGroupsResponse;
    create_cell: CreateCellRequest -> CreateCellResponse;
    take_cell: TakeCellRequest -> TakeCellResponse;
    stand_by: StandByRequest -> StandByResponse;
    release_cell: ReleaseCellRequest -> ReleaseCellResponse;
    delete_cell: DeleteCellRequest -> DeleteCellResponse;
    lose_volume_group: LoseVolumeGroupRequest -> LoseVolumeGroupResponse;
    list_nodes: ListNodesRequest -> ListNodesResponse;
    node_status: NodeStatusRequest -> NodeStatusResponse;
    health: HealthRequest -> HealthResponse;
    acknowledge_health: AcknowledgeHealthRequest -> AcknowledgeHealthResponse;
}

impl Client {
    /// Finds out whether a daemon listens. The connection is made anew when it breaks.
    ///
    /// # Errors
    /// Where no daemon was found, and what would help.
    pub(crate) async fn connect(socket: Option<&Path>, timeout: Duration) -> Result<Self, Error> {
        let socket = match socket {
            Some(socket) => socket.to_path_buf(),
            None => blockd_media::place::default_socket(),
        };
        probe(&socket).await?;
        let path = socket.clone();
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // The host is not used, and has to be there.
        let endpoint = Endpoint::from_static("http://blockd.invalid");
        let channel = endpoint.connect_with_connector_lazy(connector);
        let inner = ControlClient::new(channel).max_decoding_message_size(MAX_ANSWER);
        Ok(Self { inner, socket, timeout, shows_waits: true })
    }

    /// The folder of the socket.
    pub(crate) fn folder(&self) -> &Path {
        self.socket.parent().unwrap_or_else(|| Path::new("/"))
    }

    /// The same, with nothing said of calls that take long.
    pub(crate) fn silent(self) -> Self {
        Self { shows_waits: false, ..self }
    }

    /// Streams the events from now on, or the past ones as well.
    pub(crate) async fn events(
        &mut self,
        request: v1::EventsRequest,
    ) -> Result<Streaming<v1::Event>, Error> {
        let answer = within(self.timeout, self.inner.events(request)).await;
        answer.map(tonic::Response::into_inner).map_err(|status| self.failed(&status))
    }

    /// Streams the content of a volume.
    pub(crate) async fn diff_volume(
        &mut self,
        request: v1::DiffVolumeRequest,
    ) -> Result<Streaming<v1::DiffVolumeResponse>, Error> {
        let answer = within(self.timeout, self.inner.diff_volume(request)).await;
        answer.map(tonic::Response::into_inner).map_err(|status| self.failed(&status))
    }

    /// Declares a host of a volume group dead, and streams the steps.
    pub(crate) async fn declare_host_dead(
        &mut self,
        request: v1::DeclareHostDeadRequest,
    ) -> Result<Streaming<v1::HostStep>, Error> {
        let answer = within(self.timeout, self.inner.declare_host_dead(request)).await;
        answer.map(tonic::Response::into_inner).map_err(|status| self.failed(&status))
    }

    /// Forgets a host of a volume group, and streams the steps.
    pub(crate) async fn forget_host(
        &mut self,
        request: v1::ForgetHostRequest,
    ) -> Result<Streaming<v1::HostStep>, Error> {
        let answer = within(self.timeout, self.inner.forget_host(request)).await;
        answer.map(tonic::Response::into_inner).map_err(|status| self.failed(&status))
    }

    /// All runs of extents of a pool.
    pub(crate) async fn pool_extents(
        &mut self,
        request: v1::PoolExtentsRequest,
    ) -> Result<Vec<v1::PoolExtentsResponse>, Error> {
        let answer = within(self.timeout, self.inner.pool_extents(request)).await;
        let mut stream = answer.map_err(|status| self.failed(&status))?.into_inner();
        let mut parts = Vec::new();
        while let Some(part) = self.next(&mut stream).await? {
            parts.push(part);
        }
        Ok(parts)
    }

    /// The next message of a stream whose messages come one right after the other.
    pub(crate) async fn next<T>(&self, stream: &mut Streaming<T>) -> Result<Option<T>, Error> {
        within(self.timeout, stream.message()).await.map_err(|status| self.failed(&status))
    }

    /// The error of a call that was answered by `status`, or not answered.
    pub(crate) fn failed(&self, status: &Status) -> Error {
        let problem = match status.code() {
            _ if !status.details().is_empty() => return Error::from_status(status),
            Code::DeadlineExceeded | Code::Cancelled => {
                format!("the daemon gave no answer within {:?}", self.timeout)
            }
            Code::Unavailable | Code::Unknown => "the daemon has gone away".to_owned(),
            Code::Unimplemented => {
                "the daemon does not know this call: it is older than this command".to_owned()
            }
            _ => return Error::from_status(status),
        };
        Error::Unreachable { address: self.socket.display().to_string(), problem }
    }
}

/// The result of a call, all of its answer included: a limit of the endpoint would end with the
/// headers.
async fn within<T>(
    time: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    let late = || Err(Status::new(Code::DeadlineExceeded, ""));
    tokio::time::timeout(time, call).await.unwrap_or_else(|_| late())
}

/// Connects once by hand: a channel's errors hide the reason of a failure.
async fn probe(socket: &Path) -> Result<(), Error> {
    use std::os::unix::ffi::OsStrExt;

    let length = socket.as_os_str().as_bytes().len();
    if length > MAX_SOCKET_PATH || length == 0 {
        let allowed = format!("a path of 1 to {MAX_SOCKET_PATH} bytes");
        return Err(Error::invalid("socket", socket.display(), allowed));
    }
    let Err(error) = UnixStream::connect(socket).await else {
        return Ok(());
    };
    let address = socket.display().to_string();
    let is_socket =
        std::fs::metadata(socket).is_ok_and(|metadata| metadata.file_type().is_socket());
    let problem = match error.kind() {
        ErrorKind::PermissionDenied => "permission denied: only root and the user who runs the \
             daemon may use it"
            .to_owned(),
        ErrorKind::NotFound => NO_DAEMON.to_owned(),
        ErrorKind::ConnectionRefused if is_socket => NO_DAEMON.to_owned(),
        ErrorKind::ConnectionRefused => "is not a socket".to_owned(),
        _ => error.to_string(),
    };
    Err(Error::Unreachable { address, problem })
}

/// Bytes of the longest answer: 65,536 volumes, each with a long name and all labels that it can
/// have.
const MAX_ANSWER: usize = 512 << 20;

const NO_DAEMON: &str = "no daemon answers there: start one with `blockd serve`";
