//! The node service: makes volumes usable on this host.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::plugin::{Call, Plugin};
use crate::proto;
use crate::proto::node_server::Node;
use crate::proto::node_service_capability::{self, Rpc, rpc};

/// The service.
#[derive(Clone, Debug)]
pub struct Service {
    plugin: Arc<Plugin>,
}

impl Service {
    /// For this plugin.
    ///
    /// # Errors
    /// What is remembered can't be read.
    pub fn open(plugin: Arc<Plugin>) -> Result<Self, crate::error::Error> {
        Ok(Self { plugin })
    }
}

/// What it can do.
const CAPABILITIES: [rpc::Type; 1] = [rpc::Type::SingleNodeMultiWriter];

#[tonic::async_trait]
impl Node for Service {
    async fn node_stage_volume(
        &self,
        _: Request<proto::NodeStageVolumeRequest>,
    ) -> Result<Response<proto::NodeStageVolumeResponse>, Status> {
        Err(Status::unimplemented("NodeStageVolume"))
    }

    async fn node_unstage_volume(
        &self,
        _: Request<proto::NodeUnstageVolumeRequest>,
    ) -> Result<Response<proto::NodeUnstageVolumeResponse>, Status> {
        Err(Status::unimplemented("NodeUnstageVolume"))
    }

    async fn node_publish_volume(
        &self,
        _: Request<proto::NodePublishVolumeRequest>,
    ) -> Result<Response<proto::NodePublishVolumeResponse>, Status> {
        Err(Status::unimplemented("NodePublishVolume"))
    }

    async fn node_unpublish_volume(
        &self,
        _: Request<proto::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<proto::NodeUnpublishVolumeResponse>, Status> {
        Err(Status::unimplemented("NodeUnpublishVolume"))
    }

    async fn node_get_volume_stats(
        &self,
        _: Request<proto::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<proto::NodeGetVolumeStatsResponse>, Status> {
        Err(Status::unimplemented("NodeGetVolumeStats"))
    }

    async fn node_expand_volume(
        &self,
        _: Request<proto::NodeExpandVolumeRequest>,
    ) -> Result<Response<proto::NodeExpandVolumeResponse>, Status> {
        Err(Status::unimplemented("NodeExpandVolume"))
    }

    async fn node_get_capabilities(
        &self,
        request: Request<proto::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<proto::NodeGetCapabilitiesResponse>, Status> {
        let call = Call::new("NodeGetCapabilities", &request, "").quiet();
        let of = |kind: rpc::Type| proto::NodeServiceCapability {
            r#type: Some(node_service_capability::Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let capabilities = CAPABILITIES.map(of).to_vec();
        let answer = proto::NodeGetCapabilitiesResponse { capabilities };
        self.plugin.run(call, async { Ok(answer) }).await
    }

    async fn node_get_info(
        &self,
        request: Request<proto::NodeGetInfoRequest>,
    ) -> Result<Response<proto::NodeGetInfoResponse>, Status> {
        let call = Call::new("NodeGetInfo", &request, "").quiet();
        let place = &self.plugin.settings.place;
        let answer = proto::NodeGetInfoResponse {
            node_id: place.node.clone(),
            max_volumes_per_node: 0,
            accessible_topology: Some(place.to_wire()),
        };
        self.plugin.run(call, async { Ok(answer) }).await
    }
}
