//! The driver that is examined: its socket, its calls, and its capabilities.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::group_controller_client::GroupControllerClient;
use blockd_csi::proto::snapshot_metadata_client::SnapshotMetadataClient;
use blockd_csi::proto::{self, controller_client::ControllerClient};
use blockd_csi::proto::{identity_client::IdentityClient, node_client::NodeClient};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Response, Status};

use super::cx::Answer;

/// Entries of a list that no driver under test comes near to: a list without end is given up.
const MOST_PAGES: usize = 100_000;

/// Beyond its limit, how long a call may take whose answer has begun in time.
const GRACE: Duration = Duration::from_secs(1);

/// The capabilities that a driver offers.
#[derive(Clone, Debug, Default)]
pub struct Offers {
    pub name: String,
    pub version: String,
    /// Services, by number.
    pub plugin: Vec<i32>,
    /// Ways of volume expansion, by number.
    pub expansion: Vec<i32>,
    /// Calls of the controller, by number.
    pub controller: Vec<i32>,
    /// Calls of the node, by number.
    pub node: Vec<i32>,
    /// Calls of the group controller, by number.
    pub group: Vec<i32>,
}

/// A driver, reached through its socket. Calls wait for their answers.
#[derive(Debug)]
pub struct Driver {
    runtime: Arc<Runtime>,
    channel: Channel,
    socket: PathBuf,
    limit: Duration,
    offers: Offers,
}

macro_rules! calls {
    ($([$client:ident] $($call:ident($request:ident) -> $answer:ident;)+)+) => {$($(
        #[doc = concat!("`", stringify!($call), "`, within the usual time.")]
        ///
        /// # Errors
        /// As the driver answers.
        pub fn $call(&self, request: proto::$request) -> Answer<proto::$answer> {
            let mut client = $client::new(self.channel.clone());
            let mut request = Request::new(request);
            request.set_timeout(self.limit);
            self.wait(async move { client.$call(request).await.map(Response::into_inner) })
        }
    )+)+};
}

/// Calls with many answers: all of them, or how it failed.
macro_rules! streams {
    ($($call:ident($request:ident) -> $answer:ident;)+) => {$(
        #[doc = concat!("All that `", stringify!($call), "` says, within the usual time.")]
        ///
        /// # Errors
        /// As the driver answers, at first or later.
        pub fn $call(&self, request: proto::$request) -> Answer<Vec<proto::$answer>> {
            let mut client = self.changes();
            let mut request = Request::new(request);
            request.set_timeout(self.limit);
            self.wait(async move {
                let mut stream = client.$call(request).await?.into_inner();
                let mut all = Vec::new();
                while let Some(answer) = stream.message().await? {
                    all.push(answer);
                }
                Ok(all)
            })
        }
    )+};
}

impl Driver {
    calls! {
        [IdentityClient]
        get_plugin_info(GetPluginInfoRequest) -> GetPluginInfoResponse;
        get_plugin_capabilities(GetPluginCapabilitiesRequest) -> GetPluginCapabilitiesResponse;
        probe(ProbeRequest) -> ProbeResponse;
        [ControllerClient]
        create_volume(CreateVolumeRequest) -> CreateVolumeResponse;
        delete_volume(DeleteVolumeRequest) -> DeleteVolumeResponse;
        controller_publish_volume(ControllerPublishVolumeRequest)
            -> ControllerPublishVolumeResponse;
        validate_volume_capabilities(ValidateVolumeCapabilitiesRequest)
            -> ValidateVolumeCapabilitiesResponse;
        list_volumes(ListVolumesRequest) -> ListVolumesResponse;
        get_capacity(GetCapacityRequest) -> GetCapacityResponse;
        controller_get_capabilities(ControllerGetCapabilitiesRequest)
            -> ControllerGetCapabilitiesResponse;
        create_snapshot(CreateSnapshotRequest) -> CreateSnapshotResponse;
        delete_snapshot(DeleteSnapshotRequest) -> DeleteSnapshotResponse;
        list_snapshots(ListSnapshotsRequest) -> ListSnapshotsResponse;
        get_snapshot(GetSnapshotRequest) -> GetSnapshotResponse;
        controller_expand_volume(ControllerExpandVolumeRequest) -> ControllerExpandVolumeResponse;
        controller_get_volume(ControllerGetVolumeRequest) -> ControllerGetVolumeResponse;
        controller_modify_volume(ControllerModifyVolumeRequest) -> ControllerModifyVolumeResponse;
        [GroupControllerClient]
        group_controller_get_capabilities(GroupControllerGetCapabilitiesRequest)
            -> GroupControllerGetCapabilitiesResponse;
        create_volume_group_snapshot(CreateVolumeGroupSnapshotRequest)
            -> CreateVolumeGroupSnapshotResponse;
        delete_volume_group_snapshot(DeleteVolumeGroupSnapshotRequest)
            -> DeleteVolumeGroupSnapshotResponse;
        get_volume_group_snapshot(GetVolumeGroupSnapshotRequest)
            -> GetVolumeGroupSnapshotResponse;
        [NodeClient]
        node_stage_volume(NodeStageVolumeRequest) -> NodeStageVolumeResponse;
        node_unstage_volume(NodeUnstageVolumeRequest) -> NodeUnstageVolumeResponse;
        node_publish_volume(NodePublishVolumeRequest) -> NodePublishVolumeResponse;
        node_unpublish_volume(NodeUnpublishVolumeRequest) -> NodeUnpublishVolumeResponse;
        node_get_volume_stats(NodeGetVolumeStatsRequest) -> NodeGetVolumeStatsResponse;
        node_expand_volume(NodeExpandVolumeRequest) -> NodeExpandVolumeResponse;
        node_get_capabilities(NodeGetCapabilitiesRequest) -> NodeGetCapabilitiesResponse;
        node_get_info(NodeGetInfoRequest) -> NodeGetInfoResponse;
    }

    streams! {
        get_metadata_allocated(GetMetadataAllocatedRequest) -> GetMetadataAllocatedResponse;
        get_metadata_delta(GetMetadataDeltaRequest) -> GetMetadataDeltaResponse;
    }

    /// Connects to a driver, and reads its identity and capabilities.
    ///
    /// # Errors
    /// When it can't be reached or does not answer.
    pub fn connect(endpoint: &str, limit: Duration) -> Result<Self> {
        let mut driver = Self::unasked(endpoint, limit)?;
        driver.offers = driver.ask().with_context(|| format!("asking {endpoint}"))?;
        Ok(driver)
    }

    /// A driver that need not be there.
    ///
    /// # Errors
    /// When the endpoint is no path of a socket.
    pub fn unasked(endpoint: &str, limit: Duration) -> Result<Self> {
        let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
        ensure!(path.starts_with('/'), "{endpoint:?} is not of the form unix:///path");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("starting threads for calls")?;
        let socket = PathBuf::from(path);
        let to = socket.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let to = to.clone();
            async move { UnixStream::connect(to).await.map(TokioIo::new) }
        });
        let enter = runtime.enter();
        let channel =
            Endpoint::from_static("http://csi.invalid").connect_with_connector_lazy(connector);
        drop(enter);
        let runtime = Arc::new(runtime);
        Ok(Self { runtime, channel, socket, limit, offers: Offers::default() })
    }

    fn ask(&self) -> Result<Offers> {
        let info = self.get_plugin_info(proto::GetPluginInfoRequest {})?;
        let plugin = self.get_plugin_capabilities(proto::GetPluginCapabilitiesRequest {})?;
        let mut offers =
            Offers { name: info.name, version: info.vendor_version, ..Offers::default() };
        for capability in plugin.capabilities {
            match capability.r#type {
                Some(proto::plugin_capability::Type::Service(service)) => {
                    offers.plugin.push(service.r#type);
                }
                Some(proto::plugin_capability::Type::VolumeExpansion(expansion)) => {
                    offers.expansion.push(expansion.r#type);
                }
                None => {}
            }
        }
        let asked = self.controller_get_capabilities(proto::ControllerGetCapabilitiesRequest {});
        if let Some(answer) = there(asked)? {
            let all = answer.capabilities.into_iter().filter_map(|one| one.r#type);
            offers.controller = all
                .map(|proto::controller_service_capability::Type::Rpc(rpc)| rpc.r#type)
                .collect();
        }
        let asked = self.node_get_capabilities(proto::NodeGetCapabilitiesRequest {});
        if let Some(answer) = there(asked)? {
            let all = answer.capabilities.into_iter().filter_map(|one| one.r#type);
            offers.node =
                all.map(|proto::node_service_capability::Type::Rpc(rpc)| rpc.r#type).collect();
        }
        let asked = proto::GroupControllerGetCapabilitiesRequest {};
        if let Some(answer) = there(self.group_controller_get_capabilities(asked))? {
            use proto::group_controller_service_capability::Type;
            let all = answer.capabilities.into_iter().filter_map(|one| one.r#type);
            offers.group = all.map(|Type::Rpc(rpc)| rpc.r#type).collect();
        }
        Ok(offers)
    }

    /// The capabilities that it has reported.
    #[must_use]
    pub fn offers(&self) -> &Offers {
        &self.offers
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// For calls that go on beside each other.
    #[must_use]
    pub fn controller(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.channel.clone())
    }

    /// The same for groups.
    #[must_use]
    pub fn groups(&self) -> GroupControllerClient<Channel> {
        GroupControllerClient::new(self.channel.clone())
    }

    /// The same for streams that are not read to their end.
    #[must_use]
    pub fn changes(&self) -> SnapshotMetadataClient<Channel> {
        SnapshotMetadataClient::new(self.channel.clone())
    }

    /// Where such calls run.
    #[must_use]
    pub fn runtime(&self) -> Arc<Runtime> {
        Arc::clone(&self.runtime)
    }

    /// The same driver with another limit for its calls.
    #[must_use]
    pub fn within(&self, limit: Duration) -> Self {
        Self {
            runtime: Arc::clone(&self.runtime),
            channel: self.channel.clone(),
            socket: self.socket.clone(),
            limit,
            offers: self.offers.clone(),
        }
    }

    /// Waits for a call. The time limit of the request itself ends at the headers of its answer.
    fn wait<T>(&self, call: impl Future<Output = Answer<T>>) -> Answer<T> {
        let limit = self.limit + GRACE;
        let late = |_| Status::deadline_exceeded(format!("no end of the answer after {limit:?}"));
        let call = async { tokio::time::timeout(limit, call).await };
        self.runtime.block_on(call).map_err(late).flatten()
    }

    /// Volumes in pages of this length; 0 for all at once.
    ///
    /// # Errors
    /// As the driver answers, and when there is no end to it.
    pub fn all_volumes(&self, page: i32) -> Result<Vec<proto::Volume>> {
        let (mut all, mut token) = (Vec::new(), String::new());
        for _ in 0..MOST_PAGES {
            let request = proto::ListVolumesRequest { max_entries: page, starting_token: token };
            let answer = self.list_volumes(request)?;
            let longest = usize::try_from(page).unwrap_or(0);
            ensure!(page == 0 || answer.entries.len() <= longest, "a page is too long");
            for entry in answer.entries {
                all.push(entry.volume.context("an entry without a volume")?);
            }
            if answer.next_token.is_empty() {
                return Ok(all);
            }
            token = answer.next_token;
        }
        anyhow::bail!("a list without end")
    }

    /// Snapshots in pages of this length; 0 for all at once.
    ///
    /// # Errors
    /// As [`Self::all_volumes`].
    pub fn all_snapshots(&self, page: i32, source: &str) -> Result<Vec<proto::Snapshot>> {
        let (mut all, mut token) = (Vec::new(), String::new());
        for _ in 0..MOST_PAGES {
            let request = proto::ListSnapshotsRequest {
                max_entries: page,
                starting_token: token,
                source_volume_id: source.to_owned(),
                ..Default::default()
            };
            let answer = self.list_snapshots(request)?;
            let longest = usize::try_from(page).unwrap_or(0);
            ensure!(page == 0 || answer.entries.len() <= longest, "a page is too long");
            for entry in answer.entries {
                all.push(entry.snapshot.context("an entry without a snapshot")?);
            }
            if answer.next_token.is_empty() {
                return Ok(all);
            }
            token = answer.next_token;
        }
        anyhow::bail!("a list without end")
    }

    /// Each volume and snapshot that it lists.
    ///
    /// # Errors
    /// As [`Self::all_volumes`].
    pub fn everything(&self) -> Result<BTreeSet<String>> {
        use blockd_csi::proto::controller_service_capability::rpc::Type;
        let mut all = BTreeSet::new();
        let offered = |what: Type| self.offers.controller.contains(&i32::from(what));
        if offered(Type::ListVolumes) {
            let volumes = self.all_volumes(0)?;
            all.extend(volumes.into_iter().map(|volume| format!("volume {}", volume.volume_id)));
        }
        if offered(Type::ListSnapshots) {
            let snapshots = self.all_snapshots(0, "")?;
            all.extend(snapshots.into_iter().map(|one| format!("snapshot {}", one.snapshot_id)));
        }
        Ok(all)
    }
}

/// An answer, if the service is there at all.
fn there<T>(answer: Answer<T>) -> Result<Option<T>, Status> {
    match answer {
        Err(status) if status.code() == Code::Unimplemented => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_does_not_end_is_given_up() {
        let driver = Driver::unasked("/nonexistent", Duration::from_millis(10)).unwrap();
        let answer = driver.wait(std::future::pending::<Answer<()>>());
        assert_eq!(answer.unwrap_err().code(), Code::DeadlineExceeded);
    }
}
