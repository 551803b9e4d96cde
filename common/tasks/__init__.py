"""What recipes need for their task: images, tables, texts, chats, pretrained models. The loop imports none of it."""
