//! The controller service: makes, lists and changes volumes and snapshots.

mod capacity;
mod cells;
mod change;
mod conditions;
mod create;
mod paging;
mod snapshots;
#[cfg(test)]
mod tests;
mod volumes;

use std::future::Future;
use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::config::Config;
use crate::error::Error;
use crate::plugin::{Call, Plugin};
use crate::proto;
use crate::proto::controller_server::Controller;
use crate::proto::controller_service_capability::{self, Rpc, rpc};

pub use self::capacity::refresh_metrics as refresh_capacity_metrics;
pub(crate) use self::cells::refuse_family;
pub(crate) use self::snapshots::{
    check_parameters as check_snapshot_parameters, find as find_snapshot,
    to_wire as snapshot_to_wire,
};
pub(crate) use self::volumes::ours;
pub use self::volumes::sweep_once;

/// The service.
#[derive(Clone, Debug)]
pub struct Service {
    plugin: Arc<Plugin>,
}

/// The capabilities of the controller. Three of these can be disabled.
const CAPABILITIES: [rpc::Type; 12] = [
    rpc::Type::CreateDeleteVolume,
    rpc::Type::ListVolumes,
    rpc::Type::GetCapacity,
    rpc::Type::CreateDeleteSnapshot,
    rpc::Type::ListSnapshots,
    rpc::Type::CloneVolume,
    rpc::Type::ExpandVolume,
    rpc::Type::GetVolume,
    rpc::Type::VolumeCondition,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::ModifyVolume,
    rpc::Type::GetSnapshot,
];

impl Service {
    /// For this plugin.
    #[must_use]
    pub const fn new(plugin: Arc<Plugin>) -> Self {
        Self { plugin }
    }

    async fn run<Q, A, F>(
        &self,
        call: Call,
        request: Request<Q>,
        work: fn(Arc<Plugin>, Q) -> F,
    ) -> Result<Response<A>, Status>
    where
        A: Send + 'static,
        F: Future<Output = Result<A, Error>> + Send + 'static,
    {
        let plugin = Arc::clone(&self.plugin);
        self.plugin.run(call, work(plugin, request.into_inner())).await
    }
}

#[tonic::async_trait]
impl Controller for Service {
    async fn create_volume(
        &self,
        request: Request<proto::CreateVolumeRequest>,
    ) -> Result<Response<proto::CreateVolumeResponse>, Status> {
        let call = Call::new("CreateVolume", &request, &request.get_ref().name);
        self.run(call, request, create::create).await
    }

    async fn delete_volume(
        &self,
        request: Request<proto::DeleteVolumeRequest>,
    ) -> Result<Response<proto::DeleteVolumeResponse>, Status> {
        let call = Call::new("DeleteVolume", &request, &request.get_ref().volume_id);
        self.run(call, request, volumes::delete).await
    }

    async fn controller_publish_volume(
        &self,
        _: Request<proto::ControllerPublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerPublishVolumeResponse>, Status> {
        Err(Status::unimplemented("volumes are of one node: nothing is to be published"))
    }

    async fn controller_unpublish_volume(
        &self,
        _: Request<proto::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerUnpublishVolumeResponse>, Status> {
        Err(Status::unimplemented("volumes are of one node: nothing is to be unpublished"))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<proto::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<proto::ValidateVolumeCapabilitiesResponse>, Status> {
        let id = &request.get_ref().volume_id;
        let call = Call::new("ValidateVolumeCapabilities", &request, id).quiet();
        self.run(call, request, volumes::validate).await
    }

    async fn list_volumes(
        &self,
        request: Request<proto::ListVolumesRequest>,
    ) -> Result<Response<proto::ListVolumesResponse>, Status> {
        let call = Call::new("ListVolumes", &request, "").quiet();
        self.run(call, request, volumes::list).await
    }

    async fn get_capacity(
        &self,
        request: Request<proto::GetCapacityRequest>,
    ) -> Result<Response<proto::GetCapacityResponse>, Status> {
        let call = Call::new("GetCapacity", &request, "").quiet();
        self.run(call, request, capacity::get).await
    }

    async fn controller_get_capabilities(
        &self,
        request: Request<proto::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<proto::ControllerGetCapabilitiesResponse>, Status> {
        let call = Call::new("ControllerGetCapabilities", &request, "").quiet();
        let of = |kind: rpc::Type| proto::ControllerServiceCapability {
            r#type: Some(controller_service_capability::Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let on_node = self.plugin.settings.expand_on_node;
        let Config { health, multi_writer, .. } = self.plugin.settings.config;
        let here = |kind: &rpc::Type| match kind {
            rpc::Type::ExpandVolume => !on_node,
            rpc::Type::VolumeCondition => health,
            rpc::Type::SingleNodeMultiWriter => multi_writer,
            _ => true,
        };
        let capabilities = CAPABILITIES.into_iter().filter(here).map(of).collect();
        let answer = proto::ControllerGetCapabilitiesResponse { capabilities };
        self.plugin.run(call, async { Ok(answer) }).await
    }

    async fn create_snapshot(
        &self,
        request: Request<proto::CreateSnapshotRequest>,
    ) -> Result<Response<proto::CreateSnapshotResponse>, Status> {
        let call = Call::new("CreateSnapshot", &request, &request.get_ref().name);
        self.run(call, request, snapshots::create).await
    }

    async fn delete_snapshot(
        &self,
        request: Request<proto::DeleteSnapshotRequest>,
    ) -> Result<Response<proto::DeleteSnapshotResponse>, Status> {
        let call = Call::new("DeleteSnapshot", &request, &request.get_ref().snapshot_id);
        self.run(call, request, snapshots::delete).await
    }

    async fn list_snapshots(
        &self,
        request: Request<proto::ListSnapshotsRequest>,
    ) -> Result<Response<proto::ListSnapshotsResponse>, Status> {
        let call = Call::new("ListSnapshots", &request, &request.get_ref().snapshot_id).quiet();
        self.run(call, request, snapshots::list).await
    }

    async fn get_snapshot(
        &self,
        request: Request<proto::GetSnapshotRequest>,
    ) -> Result<Response<proto::GetSnapshotResponse>, Status> {
        let call = Call::new("GetSnapshot", &request, &request.get_ref().snapshot_id).quiet();
        self.run(call, request, snapshots::get).await
    }

    async fn controller_expand_volume(
        &self,
        request: Request<proto::ControllerExpandVolumeRequest>,
    ) -> Result<Response<proto::ControllerExpandVolumeResponse>, Status> {
        let call = Call::new("ControllerExpandVolume", &request, &request.get_ref().volume_id);
        self.run(call, request, change::expand).await
    }

    async fn controller_get_volume(
        &self,
        request: Request<proto::ControllerGetVolumeRequest>,
    ) -> Result<Response<proto::ControllerGetVolumeResponse>, Status> {
        let call = Call::new("ControllerGetVolume", &request, &request.get_ref().volume_id);
        self.run(call.quiet(), request, volumes::get).await
    }

    async fn controller_modify_volume(
        &self,
        request: Request<proto::ControllerModifyVolumeRequest>,
    ) -> Result<Response<proto::ControllerModifyVolumeResponse>, Status> {
        let call = Call::new("ControllerModifyVolume", &request, &request.get_ref().volume_id);
        self.run(call, request, change::modify).await
    }
}
