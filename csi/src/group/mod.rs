//! The group controller service: snapshots of several volumes at one moment.

mod act;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::plugin::{Call, Plugin};
use crate::proto;
use crate::proto::group_controller_server::GroupController;
use crate::proto::group_controller_service_capability::{self, Rpc, rpc};

/// The service.
#[derive(Clone, Debug)]
pub struct Service {
    plugin: Arc<Plugin>,
}

impl Service {
    /// For this plugin.
    #[must_use]
    pub const fn new(plugin: Arc<Plugin>) -> Self {
        Self { plugin }
    }
}

#[tonic::async_trait]
impl GroupController for Service {
    async fn group_controller_get_capabilities(
        &self,
        request: Request<proto::GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<proto::GroupControllerGetCapabilitiesResponse>, Status> {
        let call = Call::new("GroupControllerGetCapabilities", &request, "").quiet();
        let all = Rpc { r#type: rpc::Type::CreateDeleteGetVolumeGroupSnapshot.into() };
        let r#type = Some(group_controller_service_capability::Type::Rpc(all));
        let capabilities = vec![proto::GroupControllerServiceCapability { r#type }];
        let answer = proto::GroupControllerGetCapabilitiesResponse { capabilities };
        self.plugin.run(call, async { Ok(answer) }).await
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<proto::CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<proto::CreateVolumeGroupSnapshotResponse>, Status> {
        let call = Call::new("CreateVolumeGroupSnapshot", &request, &request.get_ref().name);
        let work = act::create(Arc::clone(&self.plugin), request.into_inner());
        self.plugin.run(call, work).await
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<proto::DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<proto::DeleteVolumeGroupSnapshotResponse>, Status> {
        let id = &request.get_ref().group_snapshot_id;
        let call = Call::new("DeleteVolumeGroupSnapshot", &request, id);
        let work = act::delete(Arc::clone(&self.plugin), request.into_inner());
        self.plugin.run(call, work).await
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<proto::GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<proto::GetVolumeGroupSnapshotResponse>, Status> {
        let id = &request.get_ref().group_snapshot_id;
        let call = Call::new("GetVolumeGroupSnapshot", &request, id).quiet();
        let work = act::get(Arc::clone(&self.plugin), request.into_inner());
        self.plugin.run(call, work).await
    }
}
