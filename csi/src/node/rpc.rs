//! The calls of the node service: each runs as a task of the plugin's.

use std::sync::Arc;
use std::time::Duration;

use tonic::{Request, Response, Status};

use super::Service;
use super::host::devices;
use super::world::Result;
use crate::cells::known_names;
use crate::config::Config;
use crate::plugin::{Call, Settings};
use crate::proto;
use crate::proto::node_server::Node;
use crate::proto::node_service_capability::{self, Rpc, rpc};

/// The capabilities of the node. The last two can be disabled.
const CAPABILITIES: [rpc::Type; 5] = [
    rpc::Type::StageUnstageVolume,
    rpc::Type::GetVolumeStats,
    rpc::Type::ExpandVolume,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::VolumeCondition,
];

/// Timeout of a check of a device and its file system. They answer out of memory, but a machine
/// that is short of time stands still for seconds.
const LOOK_TIME: Duration = Duration::from_secs(10);

#[tonic::async_trait]
impl Node for Service {
    async fn node_stage_volume(
        &self,
        request: Request<proto::NodeStageVolumeRequest>,
    ) -> Result<Response<proto::NodeStageVolumeResponse>, Status> {
        let call = Call::new("NodeStageVolume", &request, &request.get_ref().volume_id);
        let (service, asked) = (self.clone(), request.into_inner());
        let work = async move { service.stage(asked).await };
        let done = self.plugin.run(call, work).await?;
        Ok(done.map(|()| proto::NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<proto::NodeUnstageVolumeRequest>,
    ) -> Result<Response<proto::NodeUnstageVolumeResponse>, Status> {
        let call = Call::new("NodeUnstageVolume", &request, &request.get_ref().volume_id);
        let (service, asked) = (self.clone(), request.into_inner());
        let work = async move { service.unstage(asked).await };
        let done = self.plugin.run(call, work).await?;
        Ok(done.map(|()| proto::NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<proto::NodePublishVolumeRequest>,
    ) -> Result<Response<proto::NodePublishVolumeResponse>, Status> {
        let call = Call::new("NodePublishVolume", &request, &request.get_ref().volume_id);
        let (service, asked) = (self.clone(), request.into_inner());
        let work = async move { service.publish(asked).await };
        let done = self.plugin.run(call, work).await?;
        Ok(done.map(|()| proto::NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<proto::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<proto::NodeUnpublishVolumeResponse>, Status> {
        let call = Call::new("NodeUnpublishVolume", &request, &request.get_ref().volume_id);
        let (service, asked) = (self.clone(), request.into_inner());
        let work = async move { service.unpublish(asked).await };
        let done = self.plugin.run(call, work).await?;
        Ok(done.map(|()| proto::NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<proto::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<proto::NodeGetVolumeStatsResponse>, Status> {
        let call = Call::new("NodeGetVolumeStats", &request, &request.get_ref().volume_id).quiet();
        let (service, asked) = (self.clone(), request.into_inner());
        let limit = call.time_for_part(LOOK_TIME);
        self.plugin.run(call, async move { service.stats(asked, limit).await }).await
    }

    async fn node_expand_volume(
        &self,
        request: Request<proto::NodeExpandVolumeRequest>,
    ) -> Result<Response<proto::NodeExpandVolumeResponse>, Status> {
        let call = Call::new("NodeExpandVolume", &request, &request.get_ref().volume_id);
        let (service, asked) = (self.clone(), request.into_inner());
        self.plugin.run(call, async move { service.expand(asked).await }).await
    }

    async fn node_get_capabilities(
        &self,
        request: Request<proto::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<proto::NodeGetCapabilitiesResponse>, Status> {
        let call = Call::new("NodeGetCapabilities", &request, "").quiet();
        let of = |kind: rpc::Type| proto::NodeServiceCapability {
            r#type: Some(node_service_capability::Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let Config { health, multi_writer, .. } = self.plugin.settings.config;
        let here = |kind: &rpc::Type| match kind {
            rpc::Type::VolumeCondition => health,
            rpc::Type::SingleNodeMultiWriter => multi_writer,
            _ => true,
        };
        let capabilities = CAPABILITIES.into_iter().filter(here).map(of).collect();
        let answer = proto::NodeGetCapabilitiesResponse { capabilities };
        self.plugin.run(call, async { Ok(answer) }).await
    }

    async fn node_get_info(
        &self,
        request: Request<proto::NodeGetInfoRequest>,
    ) -> Result<Response<proto::NodeGetInfoResponse>, Status> {
        let call = Call::new("NodeGetInfo", &request, "").quiet();
        let plugin = Arc::clone(&self.plugin);
        let work = async move {
            let Settings { place, cells, state_dir, .. } = &plugin.settings;
            let mut topology = place.to_wire();
            for group in known_names(&plugin.daemon, state_dir).await {
                topology.segments.extend(cells.topology(&group).segments);
            }
            Ok(proto::NodeGetInfoResponse {
                node_id: place.node.clone(),
                max_volumes_per_node: devices::most_devices(),
                accessible_topology: Some(topology),
            })
        };
        self.plugin.run(call, work).await
    }
}
